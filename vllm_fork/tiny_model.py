"""A tiny hybrid model that a CPU serves at once: the demo's, the tests' and CI's.

Its architecture is Qwen3-Next's (three gated-delta layers, one full-attention
layer with a mixture of experts), its weights are random from a fixed seed, so its
answers are gibberish, but reproducible and not constant. Nothing is downloaded.

Its tokenizer is exact: one character a token and no merges, so that any sequence
of token ids survives decoding and encoding. A replayed answer is then the very
token sequence that the engine executed, which is what prefix reuse looks at.
"""

from __future__ import annotations

import json
import unicodedata
from itertools import islice
from pathlib import Path
from typing import Any, Final

VOCAB_SIZE: Final = 512
END: Final = "⟪end⟫"
"""Ends a message: the stop token, and what the chat template writes again."""
CONTROL_TOKENS: Final = (
    "⟪pad⟫",
    "⟪unknown⟫",
    END,
    "⟪system⟫",
    "⟪user⟫",
    "⟪assistant⟫",
)
"""Tokens ``0..5``. Their brackets are no characters of the alphabet, so text can
never spell one by accident."""
PAD_ID: Final = 0
END_ID: Final = CONTROL_TOKENS.index(END)

CHAT_TEMPLATE: Final = """\
{%- for message in messages -%}
{%- if message.role not in ("system", "user", "assistant") -%}
{{- raise_exception("message role must be system, user or assistant") -}}
{%- endif -%}
{{- "⟪" + message.role + "⟫" + message.content + "⟪end⟫" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "⟪assistant⟫" -}}{%- endif -%}
"""

_WEIGHTS_SEED: Final = 1


def alphabet() -> list[str]:
    """The characters of tokens ``len(CONTROL_TOKENS)..VOCAB_SIZE``, in order.

    Printable ASCII and the newline first, then letters of other scripts: each is
    one code point that no Unicode normalization changes.
    """
    ascii_characters = [chr(code) for code in range(0x20, 0x7F)]
    letters = (
        character
        for character in map(chr, range(0xA1, 0x3000))
        if unicodedata.category(character) in ("Lu", "Ll")
        and unicodedata.is_normalized("NFKC", character)
        and unicodedata.is_normalized("NFKD", character)
    )
    num_letters = VOCAB_SIZE - len(CONTROL_TOKENS) - len(ascii_characters) - 1
    return [*ascii_characters, "\n", *islice(letters, num_letters)]


def tiny_config() -> dict[str, Any]:
    """The model's ``config.json``.

    The head sizes are the smallest that vLLM's CPU kernels take; on a CPU they
    give a block of 384 tokens.
    """
    return {
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention"] * 3 + ["full_attention"],
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [0, 1, 2],
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "norm_topk_prob": True,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": 32768,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "partial_rotary_factor": 0.25,
        },
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": END_ID,
        "pad_token_id": PAD_ID,
    }


def holds_another_model(directory: Path) -> bool:
    """Whether ``directory`` has a ``config.json`` that is not the tiny model's."""
    try:
        text = (directory / "config.json").read_text(encoding="utf-8")
        return bool(json.loads(text) != tiny_config())
    except ValueError:
        return True
    except OSError:
        return False


def write_tiny_model(directory: Path) -> None:
    """Write configuration, weights, tokenizer and chat template to ``directory``.

    The folder is made when it is missing; files of the same names are replaced.
    Needs torch and transformers, which come with either engine.

    Raises:
        OSError: the directory cannot be made or written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _write_json(directory / "config.json", tiny_config())
    _write_json(
        directory / "generation_config.json",
        {"eos_token_id": END_ID, "pad_token_id": PAD_ID},
    )
    _write_tokenizer(directory)
    _write_weights(directory)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=2, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def _write_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    tokens = [*CONTROL_TOKENS, *alphabet()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=[], unk_token="⟪unknown⟫")
    )
    tokenizer.decoder = decoders.Fuse()
    # "Special" tokens are dropped from decoded text, so only the end token, which
    # no answer contains, is one (by being the tokenizer's `eos_token`).
    tokenizer.add_tokens(
        [AddedToken(t, special=False, normalized=False) for t in CONTROL_TOKENS]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": END,
            "clean_up_tokenization_spaces": False,
            "model_max_length": tiny_config()["max_position_embeddings"],
        },
    )
    template = directory / "chat_template.jinja"
    template.write_text(CHAT_TEMPLATE, encoding="utf-8")


def _write_weights(directory: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(directory, local_files_only=True)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(_WEIGHTS_SEED)

    def normal(parameter: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.randn(parameter.shape, generator=generator) * scale

    with torch.no_grad():
        # Scales under which the output depends on the whole context: weaker ones
        # repeat one token for ever, stronger ones forget what was read.
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                decay = torch.rand(parameter.shape, generator=generator)
                parameter.copy_(torch.log(decay * 0.2 + 0.005))
            elif name.endswith("dt_bias"):
                parameter.copy_(normal(parameter, 0.3) - 2.0)
            elif "embed_tokens" in name:
                parameter.copy_(normal(parameter, 1.0))
            elif parameter.dim() >= 2:
                gain = 3.0 if "lm_head" in name else 2.0
                parameter.copy_(normal(parameter, gain / parameter.shape[-1] ** 0.5))
    model.to(torch.bfloat16).save_pretrained(directory)
    # save_pretrained wrote its own view of the configuration over ours.
    _write_json(directory / "config.json", tiny_config())
