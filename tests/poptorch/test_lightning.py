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

F = torch.nn.functional


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


def test_what_a_program_cannot_do_is_said(tmp_path: Path) -> None:
    def fails(says: str, net: Any, **how: Any) -> None:
        with pytest.raises(poptorch.Error, match=says):
            trainer(tmp_path, accelerator="ipu", enable_checkpointing=False, **how).fit(net, loader(6))

    class Manual(Classifier):
        automatic_optimization = False

    class Number(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("rate", self.rate)

    class Unnamed(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            self.log("loss", batch[0].sum(), True)

    class Skips(Classifier):
        def training_step(self, batch: Any, batch_idx: Any) -> Any:
            return None

    fails("`automatic_optimization` is False", Manual())
    fails("log: 'rate' is 0.1 .float. in a step, which is captured once", Number())
    fails(r"what comes after the value of 'loss' is given by name: `log\('loss', value, on_epoch=True\)`", Unnamed())
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
