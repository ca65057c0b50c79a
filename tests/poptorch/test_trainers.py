"""Loops that others drive: `transformers.Trainer` and `accelerate`, as the page says, beside the same without us."""

# ruff: noqa: E402 - poptorch needs torch

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

import poptorch

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.filterwarnings("ignore:.*lr_scheduler.step:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]
PAGE = Path(__file__).parents[2] / "docs" / "pytorch.md"
SIZES = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 24}


def _module() -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return transformers.BertForMaskedLM(config)


def _texts(count: int) -> list[dict[str, Any]]:
    tokens = torch.randint(40, (count, 8), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": text, "labels": text} for text in tokens]


def _of_the_page(name: str) -> Any:
    """What a program on the page defines."""
    (program,) = (
        text for text in re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL) if f"class {name}" in text
    )
    found: dict[str, Any] = {"torch": torch, "poptorch": poptorch}
    exec(program.split("\n\n\nmodel = ")[0], found)  # it is ours
    return found[name]


def _trained(kind: type[Any], folder: Path) -> tuple[list[float], dict[str, Any], dict[str, Any]]:
    """The losses of steps and of evaluations, the weights, and the state of the optimiser in the checkpoint."""
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, per_device_eval_batch_size=4, num_train_epochs=2,
        learning_rate=1e-2, warmup_steps=2, lr_scheduler_type="linear", max_grad_norm=0.0, logging_steps=1,
        eval_strategy="epoch", save_strategy="epoch", report_to=[], use_cpu=True, disable_tqdm=True,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = kind(_module(), arguments, train_dataset=_texts(12), eval_dataset=_texts(20)[12:])
    trainer.train()
    history = trainer.state.log_history
    losses = [each[key] for each in history for key in ("loss", "eval_loss") if key in each]
    kept = torch.load(folder / "checkpoint-6" / "optimizer.pt")
    return losses, trainer.model.state_dict(), kept["state"]


def test_a_trainer_of_transformers(tmp_path: Path) -> None:
    """Losses, learning rates that are scheduled, evaluation between epochs, checkpoints: as without us."""
    expected = _trained(transformers.Trainer, tmp_path / "eager")
    found = _trained(_of_the_page("Trainer"), tmp_path / "ours")
    assert len(found[0]) == 8  # six steps, two evaluations
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_marked_sum_of_losses_of_transformers() -> None:
    """Both losses are trained: that of the tokens, and that of the next sentence."""
    config = transformers.BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    torch.manual_seed(0)
    theirs = transformers.BertForPreTraining(config)
    ours = copy.deepcopy(theirs)
    batch = torch.utils.data.default_collate(_texts(4)) | {"next_sentence_label": torch.tensor([0, 1, 1, 0])}
    model = poptorch.trainingModel(_of_the_page("Marked")(ours), optimizer=torch.optim.SGD(ours.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(2):
        expected = theirs(**batch).loss
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        torch.testing.assert_close(model(**batch)["loss"], expected.detach(), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict(), rtol=1e-4, atol=1e-5)


def test_a_trainer_of_transformers_as_it_is_says_what_to_write(tmp_path: Path) -> None:
    """What PyTorch does to gradients, a program does itself."""

    class Trainer(_of_the_page("Trainer")):
        _get_grad_norm = transformers.Trainer._get_grad_norm

    with pytest.raises(poptorch.Error, match="max_grad_norm"):
        _trained(Trainer, tmp_path)


def _losses(train: Callable[..., Any]) -> list[float]:
    """Of an `accelerate` loop with all that surrounds a step."""
    accelerator = accelerate.Accelerator(cpu=True)
    module = _module()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=3)
    loader = torch.utils.data.DataLoader(_texts(12), batch_size=4)
    module, optimizer, scheduler, loader = accelerator.prepare(module, optimizer, scheduler, loader)
    step = train(accelerator, module, optimizer)
    losses = []
    for batch in loader:
        losses.append(accelerator.gather(step(batch)).mean().item())
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return losses


def _eager(accelerator: Any, module: Any, optimizer: Any) -> Callable[[Any], Any]:
    def step(batch: dict[str, Any]) -> Any:
        loss = module(**batch).loss
        accelerator.backward(loss)
        return loss.detach()

    return step


def _ours(accelerator: Any, module: Any, optimizer: Any) -> Callable[[Any], Any]:
    model = poptorch.trainingModel(accelerator.unwrap_model(module), optimizer=optimizer.optimizer)
    return lambda batch: model(**batch)["loss"]


def test_a_loop_of_accelerate() -> None:
    """`prepare`, schedulers and what else surrounds the step stay; `step` and `zero_grad` find no gradients."""
    torch.testing.assert_close(_losses(_ours), _losses(_eager), rtol=1e-4, atol=1e-5)


def test_backward_of_accelerate_says_so() -> None:
    def both(accelerator: Any, module: Any, optimizer: Any) -> Callable[[Any], Any]:
        step = _ours(accelerator, module, optimizer)
        return lambda batch: accelerator.backward(step(batch))

    with pytest.raises(RuntimeError, match="does not require grad"):
        _losses(both)
