"""Lightning's trainer, on poptorch's programs and on the host: the same weights, metrics and predictions."""

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import poptorch  # noqa: E402

pytestmark = [  # Lightning's advice, and names of PyTorch that it uses
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
]


@pytest.fixture
def kit() -> Any:
    """Modules and a trainer of Lightning, whose import takes seconds: only processes that run these tests need it."""
    pytest.importorskip("lightning")
    return import_module("tests.poptorch.lightning_models")


def data(rows: int = 24) -> Any:
    numbers = torch.Generator().manual_seed(3)
    x, y = torch.randn(rows, 5, generator=numbers), torch.randint(3, (rows,), generator=numbers)
    return torch.utils.data.TensorDataset(x, y)


def loader(batch_size: int, rows: int = 24) -> Any:
    return torch.utils.data.DataLoader(data(rows), batch_size)


def same_weights(a: Any, b: Any) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict())


def test_the_same_as_on_the_host(kit: Any, tmp_path: Path) -> None:
    """Training with validation in between, and a checkpoint of each epoch; predictions, with an incomplete batch."""
    found = {}
    for accelerator in "cpu", "ipu":
        net, run = kit.module(), kit.trainer(tmp_path / accelerator, accelerator=accelerator)
        run.fit(net, loader(6), loader(8))
        logged = dict(run.callback_metrics)
        found[accelerator] = net, run, logged, torch.cat(run.predict(net, loader(8, rows=20)))
    (host, on_host, metrics, expected), (net, run, logged, predicted) = found.values()
    assert isinstance(run.strategy, kit.IPUStrategy) and run.global_step == on_host.global_step == 8
    same_weights(net, host)
    torch.testing.assert_close(predicted, expected)
    assert logged.keys() == {"loss", "spread", "val_loss", "accuracy"}
    torch.testing.assert_close(logged, metrics)
    torch.testing.assert_close(torch.tensor(net.weighed), torch.tensor(host.weighed))
    # A third epoch follows the checkpoint of the second, with the momentum and the learning rate of the scheduler.
    for net, run, *_ in found.values():
        path = run.checkpoint_callback.best_model_path
        again = kit.trainer(tmp_path, accelerator=run.accelerator.name(), max_epochs=3)
        again.fit(net, loader(6), loader(8), ckpt_path=path)
        assert again.global_step == 12
    same_weights(net, host)


@pytest.mark.thorough
def test_options_for_each_stage(kit: Any, tmp_path: Path) -> None:
    """Two steps a call, of two replicas and two micro-batches each, are two steps of four times the rows."""
    training, inference = poptorch.Options().deviceIterations(2), poptorch.Options().deviceIterations(3)
    training.replicationFactor(2).Training.gradientAccumulation(2)
    strategy = kit.IPUStrategy(training_opts=training, inference_opts=inference)
    net, run = kit.module(), kit.trainer(tmp_path, accelerator="ipu", strategy=strategy)
    run.fit(net, loader(3), loader(4))
    assert run.global_step == 2 and run.num_training_batches == 1 and run.num_val_batches == [2]
    host, on_host = kit.module(), kit.trainer(tmp_path, accelerator="cpu")
    on_host.fit(host, loader(12), loader(4))
    same_weights(net, host)
    torch.testing.assert_close(run.callback_metrics["val_loss"], on_host.callback_metrics["val_loss"])
    assert run.predict(net, loader(4))[1].shape == (12, 3)


@pytest.mark.thorough
def test_what_the_trainer_says_becomes_options(kit: Any, tmp_path: Path) -> None:
    net = kit.module()
    run = kit.trainer(
        tmp_path, accelerator="ipu", devices=2, accumulate_grad_batches=3, precision="bf16-true", max_epochs=1
    )
    made = []
    net.on_train_start = lambda: made.append(run.strategy.training_opts)  # type: ignore[method-assign]
    run.fit(net, loader(4))
    (options,) = made
    assert (options.replication_factor, options.Training.gradient_accumulation) == (2, 3)
    assert run.global_step == 1 and run.accumulate_grad_batches == 3
    assert net.layers[0].weight.dtype == torch.bfloat16 and type(net.layers[0].weight) is torch.nn.Parameter


@pytest.mark.thorough
def test_mixed_precision_and_reports(kit: Any, tmp_path: Path) -> None:
    strategy = kit.IPUStrategy(autoreport=True, autoreport_dir=tmp_path / "reports")
    net, run = kit.module(), kit.trainer(tmp_path, strategy=strategy, precision="bf16-mixed", max_epochs=1)
    sessions = []
    net.on_train_end = lambda: sessions.append(poptorch.sessionOf(strategy.training))  # type: ignore[method-assign]
    run.fit(net, loader(6))
    (session,) = sessions
    assert "bfloat16" in str(session.ir.main_graph) and net.layers[0].weight.dtype == torch.float32
    assert list((tmp_path / "reports").glob("training_step/report.html"))


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("how", ["plain", "steps", "accumulated"])
def test_logged_values_are_those_of_lightning(kit: Any, tmp_path: Path, how: str) -> None:
    """Those of all steps and micro-batches of a call."""
    accumulated = {"accumulate_grad_batches": 2} if how == "accumulated" else {}
    options = poptorch.Options().deviceIterations(2)
    given = {"strategy": kit.IPUStrategy(training_opts=options, inference_opts=options)} if how == "steps" else {}
    found = []
    for special in {"accelerator": "cpu"}, {"accelerator": "ipu", **given}:
        torch.manual_seed(1)
        net, rows = kit.Logs(), kit.Rows()
        run = kit.trainer(tmp_path, logger=rows, log_every_n_steps=1, **accumulated, **special)
        run.fit(net, loader(6), loader(4))
        found.append((dict(run.callback_metrics), run.progress_bar_metrics, rows.rows))
    (expected, bar, rows), (logged, shown, own) = found
    torch.testing.assert_close(logged, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shown, bar, atol=1e-4, rtol=1e-4)
    if how == "plain":
        torch.testing.assert_close(own, rows, atol=1e-4, rtol=1e-4)


def test_logs_of_steps_that_look_at_numbers(kit: Any, tmp_path: Path) -> None:
    found = []
    for accelerator in "cpu", "ipu":
        torch.manual_seed(1)
        (metrics,) = kit.trainer(tmp_path, accelerator=accelerator).validate(kit.Looks(), loader(4), verbose=False)
        found.append(metrics)
    assert found[0].keys() == {"val_some", "val_few", "val_accuracy"}
    torch.testing.assert_close(found[1], found[0])


def test_lists_that_steps_append_to(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for accelerator in "cpu", "ipu":
        torch.manual_seed(1)
        net, run = kit.Collects(), kit.trainer(tmp_path, accelerator=accelerator, max_epochs=1)
        run.fit(net, loader(6), loader(8))
        found[accelerator] = torch.stack(net.losses), run.callback_metrics["right"], net.results
    torch.testing.assert_close(found["ipu"], found["cpu"])
    assert len(found["ipu"][0]) == 4
    (text,) = (each for each in caplog.messages if "reads" in each)
    assert text.startswith("`training_step` reads `current_epoch`, which is 0 now.") and "changes" not in caplog.text


@pytest.mark.thorough(but_each=4)
@pytest.mark.parametrize("how", ["data", "copies", "averaged", "stochastic"])
def test_weights_that_callbacks_change_count(kit: Any, tmp_path: Path, how: str) -> None:
    if how == "averaged" and not hasattr(kit.lightning.callbacks, "EMAWeightAveraging"):
        pytest.skip("Lightning has it from 2.6 on")
    found = []
    for accelerator in "cpu", "ipu":
        torch.manual_seed(1)
        net = kit.Normed()
        run = kit.trainer(
            tmp_path, accelerator=accelerator, enable_checkpointing=False, callbacks=[kit.CALLBACKS[how]()]
        )
        run.fit(net, loader(6), loader(8))
        found.append((net.state_dict(), dict(run.callback_metrics)))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_incomplete_batches(kit: Any, tmp_path: Path) -> None:
    """They are trained on, too, and evaluated whatever number of rows a call takes."""
    found = []
    for accelerator in "cpu", "ipu":
        strategy = {"strategy": kit.IPUStrategy(inference_opts=poptorch.Options().deviceIterations(3))}
        net = kit.module()
        run = kit.trainer(tmp_path, accelerator=accelerator, **strategy if accelerator == "ipu" else {})
        run.fit(net, loader(6, rows=20))
        predicted = torch.cat(run.predict(net, loader(2, rows=17)))
        found.append((net.state_dict(), dict(run.callback_metrics), run.global_step, predicted))
    assert found[1][2] == found[0][2] == 8
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


LOADING = torch.utils.data
LOADERS = {
    "batches": lambda: LOADING.BatchSampler(LOADING.SequentialSampler(range(24)), 6, False),
    "some, shuffled": lambda: LOADING.BatchSampler(LOADING.RandomSampler(range(24), num_samples=20), 6, False),
    "of its own": lambda: [[3, 1, 2], [5, 4, 0], [7, 8, 9]],
}


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("which", LOADERS)
def test_loaders_with_batch_samplers(kit: Any, tmp_path: Path, which: str) -> None:
    found = []
    for accelerator in "cpu", "ipu":
        net, run = (
            kit.module(),
            kit.trainer(tmp_path, accelerator=accelerator, enable_checkpointing=False, max_epochs=1),
        )
        batches = LOADERS[which]()
        given = LOADING.DataLoader(data(24), batch_sampler=batches)
        run.fit(net, given if which != "some, shuffled" else LOADING.DataLoader(data(18), 6), given)
        found.append((net.state_dict(), dict(run.callback_metrics)))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_a_scheduler_with_one_factor(kit: Any, tmp_path: Path) -> None:
    nets = []
    for accelerator in "cpu", "ipu":
        scheduler = kit.Scheduler({0: 2, 3: 4})
        how = {"accelerator": accelerator, "enable_checkpointing": False, "callbacks": [scheduler]}
        net, run = kit.module(), kit.trainer(tmp_path, **how)
        run.fit(net, loader(6))
        assert run.global_step == 4 and scheduler.scheduling == {0: 2, 3: 4}
        nets.append(net)
    same_weights(*nets)


def test_what_a_program_cannot_do_is_said(kit: Any, tmp_path: Path) -> None:
    def fails(says: str, net: Any, **how: Any) -> None:
        with pytest.raises(poptorch.Error, match=says):
            kit.trainer(tmp_path, accelerator="ipu", enable_checkpointing=False, **how).fit(net, loader(6))

    class Manual(kit.Classifier):
        automatic_optimization = False

    class Number(kit.Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("rate", self.rate)

    class Skips(kit.Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return None

    fails("`automatic_optimization` is False", Manual())
    fails("log: 'rate' is 0.1 .float. in a step, which is captured once", Number())
    fails("scheduling` has several factors, .*Set one factor", kit.module(), callbacks=[kit.Scheduler({1: 2})])
    fails(
        "on_before_optimizer_step: a parameter or buffer has been changed",
        kit.module(),
        callbacks=[kit.Shrinks("before")],
    )
    fails("should return the loss.*cannot be skipped", Skips())
    fails("max_grad_norm=0.5", kit.module(), gradient_clip_val=0.5)
    given = kit.IPUStrategy(training_opts=poptorch.Options())
    fails(r"training_opts.Training.gradientAccumulation\(2\)", kit.module(), strategy=given, accumulate_grad_batches=2)
    with pytest.raises(poptorch.Error, match='precision="16-mixed".*Use "bf16-mixed"'):
        kit.trainer(tmp_path, accelerator="ipu", precision="16-mixed")
    several = poptorch.Options()
    several.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="`training_opts` are those of one of several processes"):
        kit.IPUStrategy(training_opts=several)


def test_hooks_that_are_never_called_are_named_once(kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        kit.trainer(tmp_path, accelerator="ipu", callbacks=[kit.Listening()]).fit(kit.Hooked(), loader(6))
    for name in ("Hooked.on_after_backward", "Hooked.configure_gradient_clipping", "Listening.on_before_backward"):
        assert caplog.text.count(f"{name} is never called") == 1
    assert caplog.text.count("is never called") == 3
    assert caplog.text.count("Hooked.optimizer_step calls its closure without a step") == 1
