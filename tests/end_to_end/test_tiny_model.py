"""The tiny model's tokenizer and chat template lose no token."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_fork.tiny_model import (
    CONTROL_TOKENS,
    END_ID,
    VOCAB_SIZE,
    alphabet,
    tiny_config,
    write_tiny_model,
)

ASSISTANT_ID = CONTROL_TOKENS.index("⟪assistant⟫")

any_token = st.integers(0, VOCAB_SIZE - 1)
answer_tokens = st.lists(any_token.filter(lambda token: token != END_ID), max_size=600)


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_dir, local_files_only=True)


def stream_text(tokenizer, prompt: list[int], answer: list[int]) -> str:
    """The text of ``answer`` as vLLM's server streams it, token by token."""
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(ids=prompt, skip_special_tokens=True)
    pieces = (stream.step(tokenizer._tokenizer, token) for token in answer)
    return "".join(piece or "" for piece in pieces)


def render(tokenizer, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text, add_special_tokens=False)


def test_alphabet_fills_the_vocabulary():
    characters = alphabet()
    assert len(CONTROL_TOKENS) + len(characters) == VOCAB_SIZE
    assert len(set(characters)) == len(characters)
    assert not {"⟪", "⟫"} & set(characters)


@given(ids=st.lists(any_token, max_size=600))
@settings(deadline=None)
def test_every_token_sequence_survives_decode_and_encode(tokenizer, ids):
    text = tokenizer.decode(ids, skip_special_tokens=False)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@given(question=st.text(alphabet()), answer=answer_tokens, follow_up=st.text())
@settings(deadline=None)
def test_next_turn_starts_with_this_turn(tokenizer, question, answer, follow_up):
    """ids -> streamed text -> JSON -> chat template -> the same ids, stop included."""
    first = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": question},
    ]
    prompt = render(tokenizer, first)
    assert prompt[-1] == ASSISTANT_ID
    text = json.loads(json.dumps(stream_text(tokenizer, prompt, answer)))
    second = [
        *first,
        {"role": "assistant", "content": text},
        {"role": "user", "content": follow_up},
    ]
    next_prompt = render(tokenizer, second)
    executed = [*prompt, *answer, END_ID]
    assert next_prompt[: len(executed)] == executed


def test_template_refuses_an_unknown_role(tokenizer):
    with pytest.raises(Exception, match="role must be"):
        render(tokenizer, [{"role": "oracle", "content": "?"}])


def test_writing_twice_gives_the_same_bytes(model_dir, tmp_path):
    write_tiny_model(tmp_path / "again")
    for file in sorted(model_dir.iterdir()):
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes()


def test_config_is_that_of_the_module(model_dir):
    assert json.loads((model_dir / "config.json").read_text()) == tiny_config()
