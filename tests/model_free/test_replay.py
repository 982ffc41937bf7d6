"""The reference dialog, and dialogs from files, replayed without a model."""

import json
import subprocess
import sys

import pytest

from vllm_fork import replay
from vllm_fork.replay import CheckFailed, ReplayError, Turn, load_dialog

STOCK = [0, 48, 3728, 8144, 11136]
RETAINED = [0, 3168, 7392, 10560, 11616]
TAILS = {
    "sync": [0, 3578, 7713, 10833, 12167],
    "async": [0, 3579, 7714, 10834, 12168],
}


@pytest.fixture(params=["sync", "async"])
def scheduler(request):
    return request.param


def cached(result):
    return [turn.cached for turn in result.turns]


@pytest.mark.parametrize("num_mamba_groups", [1, 3])
def test_reference_stock(scheduler, num_mamba_groups):
    result = replay.run(
        load_dialog("reference", retain=False),
        retain=False,
        scheduler=scheduler,
        num_mamba_groups=num_mamba_groups,
    )
    assert cached(result) == STOCK
    assert (result.cached, result.prompt) == (23056, 36254)
    assert result.hit_rate == pytest.approx(0.636, abs=0.0005)


@pytest.mark.parametrize("num_mamba_groups", [1, 3])
def test_reference_block_aligned(scheduler, num_mamba_groups):
    result = replay.run(
        load_dialog("reference", retain=True),
        exact_tail=False,
        scheduler=scheduler,
        num_mamba_groups=num_mamba_groups,
    )
    assert cached(result) == RETAINED
    assert (result.cached, result.prompt) == (32736, 34550)
    assert result.hit_rate == pytest.approx(0.947, abs=0.0005)


@pytest.mark.parametrize("num_mamba_groups", [1, 3])
def test_reference_exact_tail(scheduler, num_mamba_groups):
    """The default: everything executed is reused."""
    result = replay.run(
        load_dialog("reference", retain=True),
        scheduler=scheduler,
        num_mamba_groups=num_mamba_groups,
    )
    assert cached(result) == TAILS[scheduler]
    assert result.hit_rate >= 0.992


def test_reference_rolling_copies(scheduler):
    result = replay.run(
        load_dialog("reference", retain=True),
        exact_tail=False,
        copy_interval=64,
        scheduler=scheduler,
    )
    # Multiples of 64, or of the block where that is deeper.
    assert cached(result) == [0, 3520, 7680, 10816, 12160]
    assert result.hit_rate >= 0.985


def test_stock_lengths_retained(scheduler):
    """The other column: retention pays on any lengths."""
    dialog = load_dialog("reference", retain=False)
    retained = replay.run(dialog, exact_tail=False, scheduler=scheduler)
    assert retained.cached > 23056
    for turn, before in zip(retained.turns[1:], dialog, strict=False):
        assert turn.cached == (before.prompt + before.completion - 1) // 1056 * 1056


def test_the_environment_does_not_decide(monkeypatch):
    monkeypatch.setenv("VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINTS", "0")
    monkeypatch.setenv("VLLM_CHECKPOINT_RETENTION", '{"exact_tail": false}')
    assert replay.run([Turn(30, 40), Turn(80, 5)]).turns[1].cached == 69


def test_shape_of_the_result():
    result = replay.run([Turn(30, 40), Turn(80, 5)])
    assert result.as_dict() == {
        "turns": [
            {"prompt": 30, "completion": 40, "cached": 0},
            {"prompt": 80, "completion": 5, "cached": 69},
        ],
        "cached": 69,
        "prompt": 110,
        "completion": 45,
        "hit_rate": 69 / 110,
    }
    lines = result.table().splitlines()
    assert lines[0].split() == ["turn", "prompt", "completion", "cached", "hit", "rate"]
    assert lines[2].split() == ["1", "80", "5", "69", "86.2%"]
    assert lines[-1].split() == ["all", "110", "45", "69", "62.7%"]


def test_nothing_is_said_beside_the_table(tmp_path):
    """vLLM warns that there is no Triton, which runs no kernel here; of that alone it
    says nothing."""
    path = tmp_path / "dialog.json"
    path.write_text('{"turns": [{"prompt": 30, "completion": 40}]}')
    code = (
        "import logging, sys\n"
        "from vllm_fork.cli import main\n"
        "from vllm_fork.model_free import scheduler_factory\n"
        "name = 'vllm.config.vllm'\n"
        "make = scheduler_factory.VllmConfig\n"
        "def noisy(**options):\n"
        "    logging.getLogger(name).warning('something else')\n"
        "    return make(**options)\n"
        "scheduler_factory.VllmConfig = noisy\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "replay", "--dialog", str(path)],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0
    assert done.stderr == "something else\n"
    assert done.stdout.startswith("turn  prompt")


def test_dialog_from_a_file(tmp_path):
    path = tmp_path / "dialog.json"
    turns = [{"prompt": 30, "completion": 40}, {"prompt": 80, "completion": 5}]
    path.write_text(json.dumps({"turns": turns}))
    assert load_dialog(str(path), retain=True) == (Turn(30, 40), Turn(80, 5))


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[]", 'is not {"turns": […]}'),
        ("{}", 'is not {"turns": […]}'),
        ('{"turns": []}', 'is not {"turns": […]}'),
        ('{"turns": [], "turn": 1}', 'is not {"turns": […]}'),
        ('{"turns": [[1, 2]]}', "turn 0 of the dialog"),
        ('{"turns": [{"prompt": 5}]}', 'is not {"prompt": …, "completion": …}'),
        ('{"turns": [{"prompt": 5, "answer": 1}]}', "expected these two lengths"),
        ('{"turns": [{"prompt": 0, "completion": 1}]}', "has the prompt 0"),
        ('{"turns": [{"prompt": 5, "completion": -1}]}', "has the completion -1"),
        ('{"turns": [{"prompt": 5, "completion": 1.5}]}', "has the completion 1.5"),
        ('{"turns": [{"prompt": true, "completion": 1}]}', "has the prompt true"),
        ('{"turns": [{"prompt": "5", "completion": 1}]}', 'has the prompt "5"'),
        (
            '{"turns": [{"prompt": 5, "completion": 4},'
            ' {"prompt": 9, "completion": 1}]}',
            "expected at least 10",
        ),
        ('{"turns": [{"prompt": 5, "completion": 1000000}]}', "at most 1000000"),
    ],
)
def test_bad_dialogs(tmp_path, text, sentence):
    path = tmp_path / "dialog.json"
    path.write_text(text)
    with pytest.raises(ReplayError) as refusal:
        load_dialog(str(path), retain=True)
    assert sentence in str(refusal.value)
    assert "\n" not in str(refusal.value).rstrip()


def test_no_such_file(tmp_path):
    with pytest.raises(ReplayError, match="did you mean 'reference'"):
        load_dialog("refrence", retain=True)
    with pytest.raises(ReplayError, match="cannot be read"):
        load_dialog(str(tmp_path), retain=True)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ReplayError, match="it is no text"):
        load_dialog(str(binary), retain=True)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"retain": False, "exact_tail": True}, "--exact-tail 1 keeps checkpoints"),
        ({"retain": False, "copy_interval": 64}, "--copy-interval 64 makes"),
        ({"copy_interval": 20}, "a multiple of 16"),
        ({"copy_interval": -16}, "expected 0 or a multiple of 16"),
    ],
)
def test_bad_options(options, sentence):
    with pytest.raises(ReplayError, match=sentence):
        replay.run([Turn(30, 40)], **options)


@pytest.mark.parametrize(
    ("broken", "sentence"),
    [
        ("vllm_fork.retention.RetentionController._release", "blocks are still held"),
        ("vllm_fork.observer.Observer.discarded", "neither published nor discarded"),
        ("vllm_fork.observer.Observer.pinned", "was None when it was promoted"),
    ],
)
def test_a_failed_check_is_told(monkeypatch, broken, sentence):
    monkeypatch.setattr(broken, lambda *args: None)
    with pytest.raises(CheckFailed, match=sentence):
        replay.run([Turn(30, 3000)], exact_tail=False)


def test_a_wrong_state_is_told(monkeypatch):
    monkeypatch.setattr(
        "vllm_fork.model_free.memory.BlockMemory.copy_blocks", lambda *args: None
    )
    with pytest.raises(CheckFailed, match="steps met a wrong state, first turn-1"):
        replay.run([Turn(30, 40), Turn(80, 5)])


def test_import_is_light():
    code = "import sys, vllm_fork.replay; print({'vllm', 'torch'} & set(sys.modules))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "set()"
