"""Modules for Lightning's trainer, which log, collect and change weights; and a trainer that says little."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import torch
import torchmetrics

from poptorch.lightning import IPUStrategy

__all__ = ["IPUStrategy", "lightning"]

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


def module() -> Classifier:
    torch.manual_seed(1)
    return Classifier()


def trainer(folder: Path, **how: Any) -> Any:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return lightning.Trainer(**{"max_epochs": 2, "default_root_dir": folder, **quiet, **how})


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


class Hooked(Classifier):
    """Accumulates gradients by hand, and clips them."""

    def on_after_backward(self) -> None:
        raise AssertionError("There are no gradients to look at.")

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(*args, **kwargs)

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        closure() if batch_idx % 2 else super().optimizer_step(epoch, batch_idx, optimizer, closure)


class Listening(lightning.Callback):
    def on_before_backward(self, trainer: Any, module: Any, loss: Any) -> None:
        raise AssertionError("There is no loss yet.")
