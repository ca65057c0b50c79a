"""Which commit the source is of."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from popxl_addons.git_commit import GIT_COMMIT, checked_out_commit

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def test_this_commit():
    assert GIT_COMMIT is None or re.fullmatch("[0-9a-f]{7}", GIT_COMMIT)
    root = Path(__file__).parents[2]
    if shutil.which("git") and (root / ".git").is_dir():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True)
        assert checked_out_commit(root) == head.stdout[:7]


@pytest.mark.parametrize(
    "files, expected",
    [
        ({"HEAD": COMMIT + "\n"}, "0123456"),
        ({"HEAD": "ref: refs/heads/main\n", "refs/heads/main": COMMIT + "\n"}, "0123456"),
        (
            {
                "HEAD": "ref: refs/heads/main\n",
                "packed-refs": f"# peeled\nfff{COMMIT[3:]} refs/heads/main2\n{COMMIT} refs/heads/main\n",
            },
            "0123456",
        ),
        ({"HEAD": "ref: refs/heads/main\n", "packed-refs": ""}, None),
        ({"HEAD": "ref: refs/heads/main\n"}, None),
        ({}, None),
    ],
)
def test_ways_that_git_writes_it(tmp_path, files, expected):
    for name, text in files.items():
        path = tmp_path / ".git" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert checked_out_commit(tmp_path) == expected
    assert checked_out_commit(tmp_path / "inside") is None


def test_a_working_tree_beside_its_repository(tmp_path):
    (tmp_path / ".git").write_text("gitdir: ../elsewhere")
    assert checked_out_commit(tmp_path) is None
