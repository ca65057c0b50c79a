"""Lightning's trainer, on poptorch's programs and on the host: the same weights, metrics and predictions."""

import logging
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
lightning = pytest.importorskip("lightning.pytorch")

import poptorch  # noqa: E402
from poptorch.lightning import IPUStrategy  # noqa: E402

pytestmark = [  # Lightning's advice, and names of PyTorch that it uses
    pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("UserWarning", "DeprecationWarning", "FutureWarning")
]

import torchmetrics  # noqa: E402 - Lightning has it

F = torch.nn.functional
Scheduler = lightning.callbacks.GradientAccumulationScheduler


class Classifier(lightning.LightningModule):
    def __init__(self, rate: float = 0.1) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
        self.rate = rate
        self.weighed: list[Any] = []

    def forward(self, x: Any) -> Any:
        return self.layers(x)

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss, prog_bar=True)
        self.log("spread", F.mse_loss(scores, scores.mean(1, keepdim=True)), on_epoch=True, on_step=False)
        return {"loss": loss, "batch": torch.as_tensor(batch_idx * 1.0)}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.weighed.append((float(outputs["loss"]), float(outputs["batch"].max())))

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        scores = self(x)
        self.log_dict({"val_loss": F.cross_entropy(scores, y), "accuracy": (scores.argmax(1) == y).float().mean()})

    def predict_step(self, batch: Any) -> Any:
        return self(batch[0])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]


def data(rows: int = 24) -> Any:
    numbers = torch.Generator().manual_seed(3)
    x, y = torch.randn(rows, 5, generator=numbers), torch.randint(3, (rows,), generator=numbers)
    return torch.utils.data.TensorDataset(x, y)


def loader(batch_size: int, rows: int = 24) -> Any:
    return torch.utils.data.DataLoader(data(rows), batch_size)


def module() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def trainer(folder: Path, **how: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(**{"max_epochs": 2, "default_root_dir": folder, **quiet, **how})


def same_weights(a: Any, b: Any) -> None:
    torch.testing.assert_close(a.state_dict(), b.state_dict())


def test_the_same_as_on_the_host(tmp_path: Path) -> None:
    """Training with validation in between, and a checkpoint of each epoch; predictions, with an incomplete batch."""
    found = {}
    for accelerator in "cpu", "ipu":
        net, run = module(), trainer(tmp_path / accelerator, accelerator=accelerator)
        run.fit(net, loader(6), loader(8))
        logged = dict(run.callback_metrics)
        found[accelerator] = net, run, logged, torch.cat(run.predict(net, loader(8, rows=20)))
    (host, on_host, metrics, expected), (net, run, logged, predicted) = found.values()
    assert isinstance(run.strategy, IPUStrategy) and run.global_step == on_host.global_step == 8
    same_weights(net, host)
    torch.testing.assert_close(predicted, expected)
    assert logged.keys() == {"loss", "spread", "val_loss", "accuracy"}
    torch.testing.assert_close(logged, metrics)
    torch.testing.assert_close(torch.tensor(net.weighed), torch.tensor(host.weighed))
    # A third epoch follows the checkpoint of the second, with the momentum and the learning rate of the scheduler.
    for net, run, *_ in found.values():
        path = run.checkpoint_callback.best_model_path
        again = trainer(tmp_path, accelerator=run.accelerator.name(), max_epochs=3)
        again.fit(net, loader(6), loader(8), ckpt_path=path)
        assert again.global_step == 12
    same_weights(net, host)


@pytest.mark.thorough
def test_options_for_each_stage(tmp_path: Path) -> None:
    """Two steps a call, of two replicas and two micro-batches each, are two steps of four times the rows."""
    training, inference = poptorch.Options().deviceIterations(2), poptorch.Options().deviceIterations(3)
    training.replicationFactor(2).Training.gradientAccumulation(2)
    strategy = IPUStrategy(training_opts=training, inference_opts=inference)
    net, run = module(), trainer(tmp_path, accelerator="ipu", strategy=strategy)
    run.fit(net, loader(3), loader(4))
    assert run.global_step == 2 and run.num_training_batches == 1 and run.num_val_batches == [2]
    host, on_host = module(), trainer(tmp_path, accelerator="cpu")
    on_host.fit(host, loader(12), loader(4))
    same_weights(net, host)
    torch.testing.assert_close(run.callback_metrics["val_loss"], on_host.callback_metrics["val_loss"])
    assert run.predict(net, loader(4))[1].shape == (12, 3)


@pytest.mark.thorough
def test_what_the_trainer_says_becomes_options(tmp_path: Path) -> None:
    net = module()
    run = trainer(
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
def test_mixed_precision_and_reports(tmp_path: Path) -> None:
    strategy = IPUStrategy(autoreport=True, autoreport_dir=tmp_path / "reports")
    net, run = module(), trainer(tmp_path, strategy=strategy, precision="bf16-mixed", max_epochs=1)
    sessions = []
    net.on_train_end = lambda: sessions.append(poptorch.sessionOf(strategy.training))  # type: ignore[method-assign]
    run.fit(net, loader(6))
    (session,) = sessions
    assert "bfloat16" in str(session.ir.main_graph) and net.layers[0].weight.dtype == torch.float32
    assert list((tmp_path / "reports").glob("training_step/report.html"))


class Logs(Classifier):
    """Logs in every way, numbers and metrics."""

    def __init__(self) -> None:
        super().__init__()
        how = {"task": "multiclass", "num_classes": 3}
        self.accuracy, self.areas = torchmetrics.Accuracy(**how), torchmetrics.AUROC(**how)
        self.error = torchmetrics.MeanSquaredError()
        several = {"f1": torchmetrics.F1Score(**how), "recall": torchmetrics.Recall(average="macro", **how)}
        self.several = torchmetrics.MetricCollection(several, prefix="each_")

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        scores = self(x)
        loss = F.cross_entropy(scores, y)
        self.log("loss", loss, True)
        self.log("sum", loss, on_epoch=True, reduce_fx="sum")
        self.log("max", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("min", loss, on_epoch=True, reduce_fx="MIN")
        self.log("mean", loss, on_epoch=True, prog_bar=True)
        self.log("weighed", loss, on_step=False, on_epoch=True, batch_size=(y == 1).sum() + 1)
        self.accuracy(scores, y)
        self.log("accuracy", self.accuracy, on_epoch=True)
        self.areas.update(scores.softmax(1), y)
        self.log("areas", self.areas, on_step=False, on_epoch=True)
        self.log("error", self.error(scores, x[:, :3].contiguous()), on_epoch=True)
        return {
            "loss": loss + 0.1 * self.error(scores, x[:, 2:].contiguous()),
            "batch": torch.as_tensor(batch_idx * 1.0),
        }

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        scores = self(x)
        self.log("val_sum", F.cross_entropy(scores, y), reduce_fx="sum")
        self.log("val_max", F.cross_entropy(scores, y), reduce_fx=max, on_step=True)
        self.log_dict(self.several(scores, y), prog_bar=True)
        self.log("val_error", 1 - self.error(scores, x[:, :3].contiguous()) / 2)

    def on_validation_epoch_end(self) -> None:
        self.log_dict({f"all_{name}": value for name, value in self.several.compute().items()})
        self.several.reset()


class Rows(lightning.loggers.logger.Logger):
    """Keeps what is logged."""

    name = version = "rows"

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[dict[str, float]] = []

    def log_metrics(self, metrics: Any, step: Any = None) -> None:
        self.rows.append(metrics)

    def log_hyperparams(self, *args: Any) -> None:
        pass


@pytest.mark.thorough(but_each=3)
@pytest.mark.parametrize("how", ["plain", "steps", "accumulated"])
def test_logged_values_are_those_of_lightning(tmp_path: Path, how: str) -> None:
    """Those of all steps and micro-batches of a call."""
    accumulated = {"accumulate_grad_batches": 2} if how == "accumulated" else {}
    options = poptorch.Options().deviceIterations(2)
    given = {"strategy": IPUStrategy(training_opts=options, inference_opts=options)} if how == "steps" else {}
    found = []
    for special in {"accelerator": "cpu"}, {"accelerator": "ipu", **given}:
        torch.manual_seed(1)
        net, rows = Logs(), Rows()
        run = trainer(tmp_path, logger=rows, log_every_n_steps=1, **accumulated, **special)
        run.fit(net, loader(6), loader(4))
        found.append((dict(run.callback_metrics), run.progress_bar_metrics, rows.rows))
    (expected, bar, rows), (logged, shown, own) = found
    torch.testing.assert_close(logged, expected, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(shown, bar, atol=1e-4, rtol=1e-4)
    if how == "plain":
        torch.testing.assert_close(own, rows, atol=1e-4, rtol=1e-4)


class Looks(Logs):
    """What it logs, and how many rows its metric sees, depends on numbers."""

    def validation_step(self, batch: Any, batch_idx: Any) -> Any:
        x, y = batch
        scores = self(x)
        if (y == 1).sum() > 1:
            self.log("val_some", F.cross_entropy(scores, y), reduce_fx="sum")
            self.accuracy.update(scores[y == 1], y[y == 1])
        else:
            self.log("val_few", scores.mean())
        self.log("val_accuracy", self.accuracy)

    def on_validation_epoch_end(self) -> None:
        pass


def test_logs_of_steps_that_look_at_numbers(tmp_path: Path) -> None:
    found = []
    for accelerator in "cpu", "ipu":
        torch.manual_seed(1)
        (metrics,) = trainer(tmp_path, accelerator=accelerator).validate(Looks(), loader(4), verbose=False)
        found.append(metrics)
    assert found[0].keys() == {"val_some", "val_few", "val_accuracy"}
    torch.testing.assert_close(found[1], found[0])


class Collects(Classifier):
    """Keeps results of steps in lists, and trains by the number of the epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []
        self.results: dict[str, list[Any]] = {"all": []}

    def training_step(self, batch: Any, batch_idx: Any) -> Any:
        loss = super().training_step(batch, batch_idx)["loss"] * (self.current_epoch + 1)
        self.losses.append(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def validation_step(self, batch: Any, batch_idx: Any) -> None:
        self.results["all"].append({"scores": self(batch[0]), "labels": batch[1], "rows": len(batch[1])})

    def on_validation_epoch_end(self) -> None:
        rows = sum(each["rows"] for each in self.results["all"])
        scores, labels = (torch.cat([each[key] for each in self.results["all"]]) for key in ("scores", "labels"))
        self.log("right", (scores.argmax(1) == labels).sum() / rows)
        self.results["all"] = []


def test_lists_that_steps_append_to(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = {}
    for accelerator in "cpu", "ipu":
        torch.manual_seed(1)
        net, run = Collects(), trainer(tmp_path, accelerator=accelerator, max_epochs=1)
        run.fit(net, loader(6), loader(8))
        found[accelerator] = torch.stack(net.losses), run.callback_metrics["right"], net.results
    torch.testing.assert_close(found["ipu"], found["cpu"])
    assert len(found["ipu"][0]) == 4
    (text,) = (each for each in caplog.messages if "reads" in each)
    assert text.startswith("`training_step` reads `current_epoch`, which is 0 now.") and "changes" not in caplog.text


class Normed(Classifier):
    """With a batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3))


class Shrinks(lightning.Callback):
    """Writes weights, in each of several ways."""

    def __init__(self, how: str) -> None:
        self.how = how

    def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        if self.how == "data":
            for parameter in module.parameters():
                parameter.data.clamp_(-0.2, 0.2)
        elif self.how == "copies":
            module.load_state_dict({name: t * 0.9 for name, t in module.state_dict().items()})

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        if self.how == "before":
            module.layers[0].bias.data.add_(1)


CALLBACKS = {
    "data": lambda: Shrinks("data"),
    "copies": lambda: Shrinks("copies"),
    "averaged": lambda: lightning.callbacks.EMAWeightAveraging(decay=0.7),
    "stochastic": lambda: lightning.callbacks.StochasticWeightAveraging(0.1, swa_epoch_start=1),
}


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("how", CALLBACKS)
def test_weights_that_callbacks_change_count(tmp_path: Path, how: str) -> None:
    if how == "averaged" and not hasattr(lightning.callbacks, "EMAWeightAveraging"):
        pytest.skip("Lightning has it from 2.6 on")
    found = []
    for accelerator in "cpu", "ipu":
        torch.manual_seed(1)
        net = Normed()
        run = trainer(tmp_path, accelerator=accelerator, enable_checkpointing=False, callbacks=[CALLBACKS[how]()])
        run.fit(net, loader(6), loader(8))
        found.append((net.state_dict(), dict(run.callback_metrics)))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


LOADING = torch.utils.data
LOADERS = {
    "batches": lambda: LOADING.BatchSampler(LOADING.SequentialSampler(range(24)), 6, False),
    "some, shuffled": lambda: LOADING.BatchSampler(LOADING.RandomSampler(range(24), num_samples=20), 6, False),
    "of its own": lambda: [[3, 1, 2], [5, 4, 0], [7, 8, 9]],
}


def test_incomplete_batches(tmp_path: Path) -> None:
    """They are trained on, too, and evaluated whatever number of rows a call takes."""
    found = []
    for accelerator in "cpu", "ipu":
        strategy = {"strategy": IPUStrategy(inference_opts=poptorch.Options().deviceIterations(3))}
        net = module()
        run = trainer(tmp_path, accelerator=accelerator, **strategy if accelerator == "ipu" else {})
        run.fit(net, loader(6, rows=20))
        predicted = torch.cat(run.predict(net, loader(2, rows=17)))
        found.append((net.state_dict(), dict(run.callback_metrics), run.global_step, predicted))
    assert found[1][2] == found[0][2] == 8
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


@pytest.mark.thorough(but_each=2)
@pytest.mark.parametrize("which", LOADERS)
def test_loaders_with_batch_samplers(tmp_path: Path, which: str) -> None:
    found = []
    for accelerator in "cpu", "ipu":
        net, run = module(), trainer(tmp_path, accelerator=accelerator, enable_checkpointing=False, max_epochs=1)
        batches = LOADERS[which]()
        given = LOADING.DataLoader(data(24), batch_sampler=batches)
        run.fit(net, given if which != "some, shuffled" else LOADING.DataLoader(data(18), 6), given)
        found.append((net.state_dict(), dict(run.callback_metrics)))
    torch.testing.assert_close(found[1], found[0], atol=1e-5, rtol=1e-5)


def test_a_scheduler_with_one_factor(tmp_path: Path) -> None:
    nets = []
    for accelerator in "cpu", "ipu":
        scheduler = Scheduler({0: 2, 3: 4})
        how = {"accelerator": accelerator, "enable_checkpointing": False, "callbacks": [scheduler]}
        net, run = module(), trainer(tmp_path, **how)
        run.fit(net, loader(6))
        assert run.global_step == 4 and scheduler.scheduling == {0: 2, 3: 4}
        nets.append(net)
    same_weights(*nets)


def test_what_a_program_cannot_do_is_said(tmp_path: Path) -> None:
    def fails(says: str, net: Any, **how: Any) -> None:
        with pytest.raises(poptorch.Error, match=says):
            trainer(tmp_path, accelerator="ipu", enable_checkpointing=False, **how).fit(net, loader(6))

    class Manual(Classifier):
        automatic_optimization = False

    class Number(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("rate", self.rate)

    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return None

    fails("`automatic_optimization` is False", Manual())
    fails("log: 'rate' is 0.1 .float. in a step, which is captured once", Number())
    fails("scheduling` has several factors, .*Set one factor", module(), callbacks=[Scheduler({1: 2})])
    fails("on_before_optimizer_step: a parameter or buffer has been changed", module(), callbacks=[Shrinks("before")])
    fails("should return the loss.*cannot be skipped", Skips())
    fails("max_grad_norm=0.5", module(), gradient_clip_val=0.5)
    given = IPUStrategy(training_opts=poptorch.Options())
    fails(r"training_opts.Training.gradientAccumulation\(2\)", module(), strategy=given, accumulate_grad_batches=2)
    with pytest.raises(poptorch.Error, match='precision="16-mixed".*Use "bf16-mixed"'):
        trainer(tmp_path, accelerator="ipu", precision="16-mixed")
    several = poptorch.Options()
    several.Distributed.configureProcessId(0, 2)
    with pytest.raises(poptorch.Error, match="`training_opts` are those of one of several processes"):
        IPUStrategy(training_opts=several)


class _Hooked(Classifier):
    """Accumulates gradients by hand, and clips them."""

    def on_after_backward(self) -> None:
        raise AssertionError("There are no gradients to look at.")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure() if batch_idx % 2 else super().optimizer_step(epoch, batch_idx, optimizer, closure)


class _Listening(lightning.Callback):
    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        raise AssertionError("There is no loss yet.")


def test_hooks_that_are_never_called_are_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        trainer(tmp_path, accelerator="ipu", callbacks=[_Listening()]).fit(_Hooked(), loader(6))
    for name in ("_Hooked.on_after_backward", "_Hooked.configure_gradient_clipping", "_Listening.on_before_backward"):
        assert caplog.text.count(f"{name} is never called") == 1
    assert caplog.text.count("is never called") == 3
    assert caplog.text.count("_Hooked.optimizer_step calls its closure without a step") == 1
