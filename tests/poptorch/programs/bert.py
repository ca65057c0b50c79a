"""BERT's pretraining: pipelined blocks, packed sequences, LAMB, warm-up, a checkpoint in the middle."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

WORDS, WIDTH, HEADS, LENGTH, SEQUENCES, MASKED = 40, 24, 2, 16, 3, 4
MASK = WORDS - 1


class Packs(torch.utils.data.Dataset):
    """Texts that count up, several of which share a row; some words are masked, and are to be found."""

    def __len__(self):
        return 48

    def __getitem__(self, i):
        numbers = torch.Generator().manual_seed(i)
        cuts = torch.randperm(LENGTH - 1, generator=numbers)[: SEQUENCES - 1].sort().values + 1
        sequence = torch.bucketize(torch.arange(LENGTH), cuts, right=True)
        position = torch.arange(LENGTH) - torch.cat([torch.zeros(1, dtype=torch.long), cuts])[sequence]
        words = (torch.randint(WORDS - 1, (SEQUENCES,), generator=numbers)[sequence] + position) % (WORDS - 1)
        at = torch.randperm(LENGTH, generator=numbers)[:MASKED]
        return words.index_fill(0, at, MASK), sequence, position, at, words[at]


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x, mask):
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = self.norm1(x + self.out(found.transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.bias = nn.Parameter(torch.zeros(WORDS))
        for table in self.words, self.positions:
            nn.init.normal_(table.weight, std=0.3)

    def forward(self, words, sequence, position, at=None, labels=None):
        with poptorch.Block("embedding", ipu_id=0):
            x = self.norm(self.words(words) + self.positions(position))
            mask = (sequence[:, :, None] == sequence[:, None, :])[:, None]
        for i, layer in enumerate(self.layers):
            with poptorch.Block(f"layer {i}", ipu_id=i):
                x = layer(x, mask)
        with poptorch.Block("head", ipu_id=1):
            if at is not None:
                x = torch.gather(x, 1, at[..., None].expand(-1, -1, WIDTH))
            scores = x @ self.words.weight.T + self.bias
            if labels is None:
                return scores
            return F.cross_entropy(scores.flatten(0, 1), labels.flatten()), (scores.argmax(-1) == labels).float().mean()


def options():
    found = poptorch.Options().deviceIterations(2).randomSeed(7)
    found.Training.gradientAccumulation(6)
    found.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))
    return found


def parts(module):
    optimizer = poptorch.optim.LAMB(module.parameters(), lr=0.02, weight_decay=0.01, loss_scaling=128.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))
    return optimizer, schedule, poptorch.trainingModel(module, options(), optimizer)


def epochs(loader, model, schedule, count):
    losses = []
    for _ in range(count):
        for batch in loader:
            losses.append(model(*batch)[0].mean().item())
            schedule.step()
    return losses


def main(folder):
    torch.manual_seed(0)
    module = Bert()
    loader = poptorch.DataLoader(options(), Packs(), batch_size=2)
    optimizer, schedule, model = parts(module)
    losses = epochs(loader, model, schedule, 40)
    path = Path(folder, "bert.pt")
    torch.save({"model": module.state_dict(), "opt": optimizer.state_dict(), "lr": schedule.state_dict()}, path)
    losses += epochs(loader, model, schedule, 2)
    model.destroy()

    again = Bert()
    optimizer, schedule, model = parts(again)
    saved = torch.load(path)
    (
        again.load_state_dict(saved["model"]),
        optimizer.load_state_dict(saved["opt"]),
        schedule.load_state_dict(saved["lr"]),
    )
    resumed = epochs(loader, model, schedule, 2)
    print(f"bert: loss {losses[0]:.2f}, {losses[-1]:.2f}; resumed {resumed[-1]:.2f}")
    torch.testing.assert_close(resumed, losses[-len(resumed) :], rtol=1e-5, atol=1e-6)
    assert losses[-1] < 0.5 * losses[0]


if __name__ == "__main__":
    main(*sys.argv[1:])
