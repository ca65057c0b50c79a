"""Speech: convolutions and an LSTM in both directions, the CTC loss, words found by a beam search on the device."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import poptorch

CLASSES, FEATURES, TIME, LETTERS = 5, 6, 32, 4  # class 0 is the blank


class Recogniser(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(FEATURES, 16, 3, stride=2, padding=1)
        self.lstm = nn.LSTM(16, 16, bidirectional=True, batch_first=True)
        self.head = nn.Linear(32, CLASSES)

    def forward(self, sound, length, letters=None, count=None):
        x, _ = self.lstm(F.gelu(self.conv(sound)).transpose(1, 2))
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        length = (length + 1) // 2
        if letters is None:
            _, counts, found = poptorch.ctc_beam_search_decoder(log_probs, length, beam_width=8)
            return counts[:, 0], found[:, 0]
        return F.ctc_loss(log_probs, letters, length, count, zero_infinity=True)


class Words(torch.utils.data.Dataset):
    """Letters, each of which is loud in a feature of its own for a while."""

    def __len__(self):
        return 64

    def __getitem__(self, i):
        numbers = torch.Generator().manual_seed(i)
        count = int(torch.randint(2, LETTERS + 1, (), generator=numbers))
        letters = torch.randint(1, CLASSES, (count,), generator=numbers)
        sound, time = torch.randn(FEATURES, TIME, generator=numbers) * 0.2, 0
        for letter in letters:
            time += 2
            last = time + int(torch.randint(3, 6, (), generator=numbers))
            sound[letter, time:last] += 2
            time = last
        return sound, time, F.pad(letters, (0, LETTERS - count)), count


def main(folder=None):
    torch.manual_seed(0)
    module = Recogniser()
    options = poptorch.Options().deviceIterations(2)
    options.Training.gradientAccumulation(2)
    loader = poptorch.DataLoader(
        options, Words(), batch_size=8, shuffle=True, num_workers=2, mode=poptorch.DataLoaderMode.Async
    )
    optimizer = poptorch.optim.RMSprop(module.parameters(), lr=3e-3)
    model = poptorch.trainingModel(module, options, optimizer)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
    losses = []
    for _ in range(30):
        losses.append(sum(model(*batch).item() for batch in loader) / len(loader))
        schedule.step(losses[-1])
    loader.terminate()
    sound, length, letters, count = torch.utils.data.default_collate([Words()[i] for i in range(16)])
    counts, found = poptorch.inferenceModel(module)(sound, length)
    right = sum(f[:n].tolist() == w[:m].tolist() for f, n, w, m in zip(found, counts, letters, count, strict=True))
    print(f"speech: loss {losses[0]:.2f}, {losses[-1]:.3f}; {right} of 16 words right")
    assert losses[-1] < 0.2 * losses[0] and right >= 12


if __name__ == "__main__":
    main(*sys.argv[1:])
