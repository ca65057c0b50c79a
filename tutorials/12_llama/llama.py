# %% [markdown]
# # Llama's weights in, text out
#
# Weights as Hugging Face keeps them, the model that they are of, and text from it, many
# tokens a run. Then the model learns, and speaks between two steps with the weights
# that it has just then; and these go back into a file. README.md beside this file tells
# the story.
#
#     python tutorials/12_llama/llama.py
#     python tutorials/12_llama/llama.py --weights FOLDER \
#         --prompt "The capital of France is"

# %%
import argparse
import atexit
import codecs
import contextlib
import io
import json
import sys
import tempfile
from functools import partial
from pathlib import Path

import numpy as np
import safetensors.numpy

import popxl
import popxl_addons as addons
from popxl import ops
from popxl_addons import optimizers
from popxl_addons.layers import LanguageConfig, LanguageModel

with contextlib.redirect_stdout(io.StringIO()):  # it prints itself
    import this

parser = argparse.ArgumentParser(description="Llama's weights in, text out.")
parser.add_argument(
    "--weights",
    type=Path,
    help="a folder with config.json, .safetensors and maybe tokenizer.json",
)
parser.add_argument(
    "--prompt",
    action="append",
    help="what a text begins with; may be given several times",
)
parser.add_argument("--tokens", type=int, default=32, help="how many are to follow")
parser.add_argument(
    "--bfloat16", action="store_true", help="keep weights and cache in bfloat16"
)
parser.add_argument(
    "--device",
    default="cpu",
    help="where all of it runs, such as gpu or tpu (default: %(default)s)",
)
parser.add_argument("--flax", action="store_true", help="run the program in Flax, too")
# A notebook has no arguments of its own.
args = parser.parse_args(sys.argv[1:] if "__file__" in globals() else [])
if args.weights is not None and not (args.weights / "config.json").exists():
    parser.error(f"--weights: {args.weights} is no folder with a config.json")
if not all(args.prompt or ["a"]):
    parser.error("--prompt: expected a text of one character or more")

scratch = tempfile.TemporaryDirectory()
atexit.register(scratch.cleanup)


def title(text: str) -> None:
    print(f"\n=== {text} ===\n")


# %% [markdown]
# ## 1. Weights in the layout of Hugging Face

# %%
title("1. Weights in the layout of Hugging Face")

WIDTH, HIDDEN, LAYERS, HEADS, KEY_HEADS, CHANNELS = 64, 160, 4, 4, 2, 16


def random_llama(folder: Path) -> Path:
    """A Llama whose tokens are bytes, with random weights, as `save_pretrained` would
    write it: in two files."""
    config = {
        "model_type": "llama",
        "vocab_size": 256,
        "hidden_size": WIDTH,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KEY_HEADS,
        "head_dim": CHANNELS,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
    }
    shapes = {
        "model.embed_tokens.weight": (256, WIDTH),
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (256, WIDTH),
    }
    for i in range(LAYERS):
        for name, shape in {
            "input_layernorm": (WIDTH,),
            "post_attention_layernorm": (WIDTH,),
            "self_attn.q_proj": (HEADS * CHANNELS, WIDTH),
            "self_attn.k_proj": (KEY_HEADS * CHANNELS, WIDTH),
            "self_attn.v_proj": (KEY_HEADS * CHANNELS, WIDTH),
            "self_attn.o_proj": (WIDTH, HEADS * CHANNELS),
            "mlp.gate_proj": (HIDDEN, WIDTH),
            "mlp.up_proj": (HIDDEN, WIDTH),
            "mlp.down_proj": (WIDTH, HIDDEN),
        }.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
    random = np.random.default_rng(0)
    weights = {
        name: (
            np.ones(shape) if "norm" in name else random.normal(0, 0.05, shape)
        ).astype(np.float32)
        for name, shape in shapes.items()
    }
    names = list(weights)
    where = {
        name: f"model-0000{1 + 2 * i // len(names)}-of-00002.safetensors"
        for i, name in enumerate(names)
    }
    for file in sorted(set(where.values())):
        safetensors.numpy.save_file(
            {n: weights[n] for n in names if where[n] == file},
            folder / file,
            {"format": "pt"},
        )
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": where})
    )
    (folder / "config.json").write_text(json.dumps(config))
    return folder


folder = random_llama(Path(scratch.name)) if args.weights is None else args.weights
for path in sorted(folder.iterdir()):
    print(path.name)

# %% [markdown]
# ## 2. The model, and its weights

# %%
title("2. The model, and its weights")

config = LanguageConfig.from_hugging_face(folder)
dtype = popxl.bfloat16 if args.bfloat16 else popxl.float32
model = LanguageModel(config, dtype)

names = config.names
last = f"layers.{config.layers - 1}"
shown = [
    "embedding.weight",
    f"{last}.attention.query.weight",
    f"{last}.mlp.down.weight",
]
for name in shown if config.tied else [*shown, "head.weight"]:
    stored = names.stored_form(name)
    part, parts = stored.part
    form = [f"part {part + 1} of {parts}"] * (parts > 1) + [
        "transposed"
    ] * stored.transposed
    print(", ".join([f"{name:32} {stored.name}", *form]))

# %% [markdown]
# ## 3. Text out

# %%
title("3. Text out")


class Bytes:
    """Bytes are tokens, where there is no tokenizer."""

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(t for t in tokens if t < 256).decode(errors="replace")


class Tokenizer:
    """What `tokenizer.json` says."""

    def __init__(self, file: Path) -> None:
        import tokenizers

        self._known = tokenizers.Tokenizer.from_file(str(file))

    def encode(self, text: str) -> list[int]:
        return self._known.encode(text).ids

    def decode(self, tokens: list[int]) -> str:
        return self._known.decode(tokens)


speech = (
    Tokenizer(folder / "tokenizer.json")
    if (folder / "tokenizer.json").exists()
    else Bytes()
)
prompts = args.prompt or ["Beautiful", "Explicit is", "Flat is better"]
tokens = [speech.encode(prompt) for prompt in prompts]
longest = max(map(len, tokens))
room = min(config.context, longest + args.tokens)
# one, several, or none
end = json.loads((folder / "config.json").read_text()).get("eos_token_id")

generator_of = partial(
    addons.Generator, model, prompt=longest, tokens=8, device_desc=args.device
)
generator = generator_of(
    batch=len(prompts), room=room, temperature=0.8, top_k=50, top_p=0.95, end=end
)
addons.load_safetensors(generator.variables, folder, names, narrow=args.bfloat16)

with generator as generate:
    texts = generate(tokens, room - longest, seed=1)
    again = generate(tokens, room - longest, seed=1)
for prompt, text in zip(prompts, texts, strict=True):
    print(prompt, "->", repr(speech.decode(text)))
print("the same seed, the same texts:", texts == again)

memory = generator.writing.memory()
weights_bytes = sum(
    v.nelms * v.dtype.itemsize for v in generator.variables.values_flat()
)
cache_bytes = memory.variables - weights_bytes
print(f"weights {weights_bytes:,} bytes, cache {cache_bytes:,} bytes")
# a CPU multiplies bfloat16 in float32, so it needs a layer's weights in that, too
if dtype is popxl.float32:
    print(
        "a run needs less than a fifth of the cache besides:",
        memory.temporaries < cache_bytes / 5,
    )

# %% [markdown]
# A folder of one's own ends here. The model that was made up goes on, and learns.

# %%
if args.weights is not None:
    sys.exit()

# %% [markdown]
# ## 4. It learns, and speaks meanwhile

# %%
title("4. It learns, and speaks meanwhile")

lines = codecs.decode(this.s, "rot13").splitlines()[2:7]  # of the Zen of Python
said = np.frombuffer(("\n".join(lines * 3) + "\n").encode(), np.uint8).astype(np.int32)
starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
LENGTH, STEPS = 64, 120
# one from the start of each line on
windows = np.stack([said[start : start + LENGTH + 1] for start in starts])


class Loss(addons.Module):
    """How surprised the model is by what comes next."""

    def __init__(self) -> None:
        super().__init__()
        self.model = model

    def build(self, text: popxl.Tensor, following: popxl.Tensor) -> popxl.Tensor:
        logits = self.model(text)
        return addons.cross_entropy(
            logits.reshape((-1, config.vocabulary)), following.reshape((-1,))
        )


ir = popxl.Ir()
with ir.main_graph:
    text, following = (
        popxl.h2d_stream((len(lines), LENGTH), popxl.int32, name)
        for name in ("text", "following")
    )
    training = addons.train_step(
        Loss(),
        text,
        following,
        optimizer=partial(optimizers.adamw, lr=3e-3, clip_norm=1.0),
    )
    loss = popxl.d2h_stream((), popxl.float32, "loss")
    ops.host_store(loss, training.loss)
learned = training.variables.model
addons.load_safetensors(learned, folder, names)


def recited(generate: addons.Generator) -> list[str]:
    return [
        prompt + speech.decode(t)
        for prompt, t in zip(prompts, generate(tokens, room - longest), strict=True)
    ]


def known(texts: list[str]) -> str:
    return (
        f"{sum(text.rstrip() in lines for text in texts)} of {len(texts)} lines known"
    )


with (
    popxl.Session(ir, args.device) as session,
    generator_of(
        batch=len(prompts), temperature=0, end=ord("\n"), weights=(session, learned)
    ) as generate,
):
    print("before:", known(recited(generate)))
    for _ in range(STEPS):
        outputs = session.run({text: windows[:, :-1], following: windows[:, 1:]})
    print(f"after {STEPS} steps:", known(recited(generate)))
    print("".join(recited(generate)))

    # %% [markdown]
    # ## 5. And back

    title("5. And back")
    after = Path(scratch.name, "after")
    addons.save_safetensors(learned, after, names, session=session)
    (after / "config.json").write_text(json.dumps(config.to_hugging_face()))

kept = safetensors.numpy.load_file(after / "model.safetensors")
print(len(kept), "weights, such as lm_head.weight", kept["lm_head.weight"].shape)

# %% [markdown]
# What does not fit is told, all of it, and nothing is loaded.

# %%
wrong = Path(scratch.name, "wrong.safetensors")
safetensors.numpy.save_file(
    {"head.weight" if n == "lm_head.weight" else n: w for n, w in kept.items()}, wrong
)
try:
    addons.load_safetensors(learned, wrong, names)
except ValueError as problem:
    print(str(problem).replace(scratch.name, "..."))

# %% [markdown]
# ## 6. Compared with Flax

# %%
if args.flax:
    import in_flax

    title("6. Compared with Flax")
    plain = generator_of(batch=len(prompts), temperature=0)
    addons.load_safetensors(plain.variables, after, names)
    with plain as generate:
        ours = generate(tokens, 24)
    print("the same tokens as in Flax:", in_flax.generate(after, tokens, 24) == ours)
