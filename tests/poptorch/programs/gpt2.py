"""GPT-2's pretraining: packed texts, options from a file, clipped gradients, validation in between, and a text."""

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

WORDS, WIDTH, HEADS, LENGTH = 11, 32, 2, 12
OPTIONS = """
# two steps of the optimizer in each call
deviceIterations(2)
Training.gradientAccumulation(4)
setExecutionStrategy(poptorch.PipelinedExecution())
outputMode(poptorch.OutputMode.All)
"""


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU("tanh"), nn.Linear(4 * WIDTH, WIDTH))
        self.drop = nn.Dropout(0.05)

    def forward(self, x, mask):
        heads = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        found = F.scaled_dot_product_attention(*heads, attn_mask=mask)
        x = x + self.drop(self.out(found.transpose(1, 2).flatten(2)))
        return x + self.drop(self.mlp(self.norm2(x)))


class GPT2(nn.Module):
    def __init__(self, layers=2):
        super().__init__()
        self.words, self.positions = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(layers))
        self.norm = nn.LayerNorm(WIDTH)
        self.register_buffer("causal", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), persistent=False)
        poptorch.BeginBlock(self.words, ipu_id=0)  # what follows belongs to it, until the next
        poptorch.BeginBlock(self.blocks[1], ipu_id=1)

    def forward(self, words, text, labels=None):
        x = self.words(words) + self.positions.weight
        mask = (self.causal & (text[:, :, None] == text[:, None, :]))[:, None]
        for block in self.blocks:
            x = block(x, mask)
        scores = self.norm(x) @ self.words.weight.T
        if labels is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), labels.flatten(), ignore_index=-100)


def packed(start):
    """Two texts in a row, which count in steps of their own; what follows the end of a text is not asked for."""
    cut = 5 + start % 3
    texts = torch.arange(LENGTH) >= cut
    words = torch.where(texts, start + 2 * torch.arange(LENGTH), start + torch.arange(LENGTH)) % WORDS
    labels = words.roll(-1)
    labels[[cut - 1, -1]] = -100
    return words, texts.int(), labels


def main(folder):
    torch.manual_seed(0)
    path = Path(folder, "gpt2.conf")
    path.write_text(OPTIONS)
    options = poptorch.Options().loadFromFile(path).randomSeed(1)
    module = GPT2()
    rows = [packed(start) for start in range(32)]
    loader = poptorch.DataLoader(options, rows, batch_size=2, shuffle=True)
    optimizer = poptorch.optim.AdamW(module.parameters(), lr=1e-2, max_grad_norm=1.0)
    optimizer.variable_attrs.markAsVariable("betas")  # the schedule changes them, too
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=60)
    model = poptorch.trainingModel(module.train(), options, optimizer)
    inference = poptorch.Options()
    inference.setExecutionStrategy(poptorch.ShardedExecution())  # a pipeline would ask for as many batches as stages
    validation = poptorch.inferenceModel(module.eval(), inference)  # a second wrapper, without dropout
    held_out = [torch.stack(column) for column in zip(*(packed(start) for start in range(32, 36)), strict=True)]
    losses = []
    for _ in range(30):
        for batch in loader:
            model(*batch)
            schedule.step()
        losses.append(validation(*held_out).item())

    reader = poptorch.inferenceModel(
        module, inference
    )  # one shape for all lengths: what follows is masked by the order
    words, text = torch.zeros(1, LENGTH, dtype=torch.int), torch.zeros(1, LENGTH, dtype=torch.int)
    words[0, :3] = torch.tensor([4, 5, 6])
    for end in range(3, LENGTH):
        words[0, end] = reader(words, text)[0, end - 1].argmax()
    print(f"gpt2: loss {losses[0]:.2f}, {losses[-1]:.2f}; 4 5 6 goes on as {words[0, 3:7].tolist()}")
    torch.testing.assert_close(torch.tensor(losses[-1]), module(*held_out).detach())
    assert losses[-1] < 0.3 and words[0, 3:7].tolist() == [7, 8, 9, 10]


if __name__ == "__main__":
    main(*sys.argv[1:])
