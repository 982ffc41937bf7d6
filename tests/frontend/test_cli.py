"""The command as a user meets it: its own process, its output, its exit code."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner

from vllm_fork import activation, plugin, prefix_grid
from vllm_fork.cli import app
from vllm_fork.config import RETAIN_ENV, RETENTION_ENV, SERVE_ENV

SCRIPTS = Path(sys.executable).parent
pytestmark = pytest.mark.timeout(180)


def run(*command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(SCRIPTS / command[0]), *command[1:]],
        env=os.environ | environ,
        capture_output=True,
        text=True,
        timeout=150,
    )


def settings(**events: object) -> dict[str, str]:
    return {RETENTION_ENV: json.dumps({"events": events})}


FREE = settings(endpoint="tcp://127.0.0.1:0", replay_endpoint="tcp://127.0.0.1:0")


def test_importing_it_is_light():
    code = (
        "import sys, vllm_fork.cli, vllm_fork.events, vllm_fork.plugin;"
        "print({'vllm', 'torch', 'transformers'} & set(sys.modules))"
    )
    done = run("python", "-c", code)
    assert done.stdout.strip() == "set()", done.stderr


def test_vllm_serve_is_refused_in_one_sentence(hybrid_model):
    done = run(
        *("vllm", "serve", str(hybrid_model), "--no-enable-prefix-caching"),
        **{RETAIN_ENV: "1"},
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("vllm-fork: Decode checkpoints are")
    assert "Traceback" not in done.stdout + done.stderr


def test_vllm_fork_serve_is_refused_in_one_sentence(hybrid_model):
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        done = run(
            *("vllm-fork", "serve", str(hybrid_model), "--max-model-len", "2048"),
            **settings(
                endpoint=f"tcp://127.0.0.1:{port}", replay_endpoint="tcp://127.0.0.1:0"
            ),
        )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "vllm-fork: The event stream cannot start: tcp://127.0.0.1:"
    )
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("environ", "sentence"),
    [
        ({RETENTION_ENV: "{"}, f"{RETENTION_ENV} is not JSON"),
        ({RETAIN_ENV: "maybe"}, f"{RETAIN_ENV} is 'maybe': expected 0 or 1."),
        ({"VLLM_PLUGINS": "other"}, "set VLLM_PLUGINS=other,vllm_fork, or unset it."),
    ],
)
def test_bad_environment_is_told_before_anything_is_loaded(environ, sentence):
    done = run("vllm-fork", "serve", "no-such-model", **environ)
    assert done.returncode == 2
    assert done.stdout == ""
    assert sentence in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_misspelt_variable_is_told_before_the_server_starts():
    misspelt = "VLLM_CHECKPOINT_RETENTON"
    done = run("vllm-fork", "serve", **{misspelt: "{}", RETENTION_ENV: "{"})
    assert done.stderr.splitlines()[0] == (
        f"vllm-fork: warning: The environment variable {misspelt} is not read (did you "
        f"mean {RETENTION_ENV!r}?): unset or correct it."
    )


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["/no/such/model"], "There is no folder /no/such/model: name that of a model"),
        ([], "No model is named: name its folder"),
        (["no-such/model"], "vLLM cannot read the model no-such/model: "),
    ],
)
def test_model_that_is_not_there_is_one_sentence(arguments, sentence):
    done = run("vllm-fork", "serve", *arguments, "--port", "0", **FREE)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"vllm-fork: {sentence}")
    assert "Traceback" not in done.stdout + done.stderr


def test_taken_address_is_one_sentence():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        address = ("--host", "127.0.0.1", "--port", port)
        done = run("vllm-fork", "serve", "no-such/model", *address, **FREE)
    assert done.returncode == 2
    sentence = f"vllm-fork: The server cannot listen on 127.0.0.1:{port} (address alrea"
    assert done.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stdout + done.stderr


def doctor(*arguments: str) -> tuple[dict, int]:
    """In this process: loading vLLM takes seconds."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return json.loads(result.stdout.splitlines()[-1]), result.exit_code


@pytest.fixture
def quiet_environment(monkeypatch):
    """The doctor sets variables: they go with the test."""
    monkeypatch.setenv(SERVE_ENV, "0")
    for name, value in FREE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "serving_pid", None)


def test_doctor_keeps_the_warning_of_torch_to_itself(hybrid_model):
    done = run("vllm-fork", "doctor", str(hybrid_model), "--port", "0", **FREE)
    assert done.returncode == 0, done.stdout
    assert "Triton not available" not in done.stderr


@pytest.mark.usefixtures("quiet_environment")
class TestDoctor:
    def test_hybrid_model(self, hybrid_model):
        options = ("--prefix-match-unit", "16", "--port", "0")
        report, code = doctor(str(hybrid_model), *options)
        assert (report["retention"], report["reason"], code) == ("on", None, 0)
        assert {f["subject"] for f in report["findings"]} == {
            "version",
            "plugin",
            "settings",
            "events",
            "tracing",
        }

    def test_model_that_is_not_hybrid(self, dense_model):
        report, code = doctor(str(dense_model))
        assert (report["retention"], code) == ("off", 1)
        assert report["reason"].startswith("LlamaForCausalLM is not a hybrid model")

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (
                ["--prefix-match-unit", "17"],
                "--prefix-match-unit 17 does not divide the block size of 384 tokens "
                "that vLLM chooses for this model: take one that does, such as 16.",
            ),
            (
                ["--prefix-cache-retention-interval", "400"],
                "--prefix-cache-retention-interval 400 is no multiple of the block "
                "size of 384 tokens that vLLM chooses for this model: take 0, or 768.",
            ),
        ],
    )
    def test_what_the_engine_would_refuse(self, hybrid_model, arguments, sentence):
        report, code = doctor(str(hybrid_model), *arguments)
        assert (report["retention"], code) == ("refused", 1)
        assert report["reason"] == sentence

    @pytest.mark.parametrize("unit", [[], ["--prefix-match-unit", "384"]])
    def test_what_is_lost_without_a_fine_unit(self, hybrid_model, unit, monkeypatch):
        copies = json.loads(FREE[RETENTION_ENV]) | {"copy_interval": 384}
        monkeypatch.setenv(RETENTION_ENV, json.dumps(copies))
        report, code = doctor(str(hybrid_model), *unit, "--port", "0")
        assert (report["retention"], code) == ("on", 0)
        sentences = [f["sentence"] for f in report["findings"]]
        assert any("at block ends (every 384 tokens) and exact" in s for s in sentences)
        assert any("No rolling copy will be made every 384" in s for s in sentences)

    def test_a_block_size_that_only_the_engine_knows(self, hybrid_model, monkeypatch):
        monkeypatch.setattr(prefix_grid, "expected_block_size", lambda _: None)
        arguments = ("--prefix-match-unit", "17", "--port", "0")
        report, code = doctor(str(hybrid_model), *arguments)
        assert (report["retention"], code) == ("on", 0)
        sentences = [f["sentence"] for f in report["findings"]]
        assert any("17 must divide the block size, which only" in s for s in sentences)

    def test_argument_that_prevents_it(self, hybrid_model):
        report, code = doctor(str(hybrid_model), "--no-enable-prefix-caching")
        assert (report["retention"], code) == ("refused", 1)
        assert "prefix cache, which is off" in report["reason"]

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            ("/no/such/model", "There is no folder /no/such/model: name that of"),
            ("no/such/model", "There is no folder no/such/model"),
            ("no-such/model", "vLLM cannot read the model no-such/model: "),
        ],
    )
    def test_model_that_is_not_there(self, model, words, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        report, code = doctor(model)
        assert (report["retention"], code) == ("unknown", 1)
        assert report["reason"].startswith(words)
        assert "\n" not in report["reason"]

    def test_no_model_beside_arguments(self):
        report, code = doctor("--prefix-match-unit", "16")
        assert (report["retention"], code) == ("unknown", 1)
        assert report["reason"].startswith("No model is named: ")

    def test_taken_address(self, hybrid_model):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            address = ("--host", "127.0.0.1", "--port", port)
            report, code = doctor(str(hybrid_model), *address)
        assert code == 1
        sentences = [f["sentence"] for f in report["findings"]]
        assert any(f"cannot listen on 127.0.0.1:{port} " in s for s in sentences)

    def test_words(self, dense_model):
        result = CliRunner().invoke(app, ["doctor", str(dense_model)])
        assert result.stdout.splitlines()[-1].startswith("retention off: Llama")

    def test_healthy(self):
        report, code = doctor()
        assert (report["retention"], code) == ("unknown", 0)

    def test_plugin_not_allowed(self, monkeypatch):
        monkeypatch.setenv("VLLM_PLUGINS", "")
        report, code = doctor("some-model")
        assert (report["retention"], code) == ("refused", 1)
        assert "set VLLM_PLUGINS=vllm_fork" in report["reason"]

    def test_switched_off(self, monkeypatch):
        monkeypatch.setenv(RETAIN_ENV, "0")
        report, code = doctor("some-model")
        assert (report["retention"], code) == ("off", 1)

    def test_unreadable_settings(self, monkeypatch):
        monkeypatch.setenv(RETENTION_ENV, '{"retian": 1}')
        report, code = doctor("some-model")
        assert (report["retention"], code) == ("refused", 1)
        assert "did you mean 'retain'" in report["reason"]

    def test_misspelt_variable(self, monkeypatch):
        monkeypatch.setenv("VLLM_PREFIX_CACHE_RETAIN_DECODE_CHECKPOINT", "1")
        report, code = doctor()
        assert code == 0
        sentences = [f["sentence"] for f in report["findings"]]
        assert any(f"did you mean {RETAIN_ENV!r}?" in s for s in sentences)

    def test_taken_port(self, monkeypatch):
        with zmq.Context() as context, context.socket(zmq.PUB) as taken:
            port = taken.bind_to_random_port("tcp://127.0.0.1")
            endpoint = f"tcp://127.0.0.1:{port}"
            monkeypatch.setenv(*next(iter(settings(endpoint=endpoint).items())))
            report, code = doctor()
        assert code == 1
        sentences = [f["sentence"] for f in report["findings"]]
        assert any(f"{endpoint} is in use" in sentence for sentence in sentences)


def test_replay_json():
    """Cheap dialog: the reference's own numbers are tests/model_free's."""
    options = ["--dialog", "reference", "--retain", "0", "--json"]
    result = CliRunner().invoke(app, ["replay", *options])
    report = json.loads(result.stdout.splitlines()[-1])
    assert (report["cached"], report["prompt"]) == (23056, 36254)
    assert set(report) == {"turns", "cached", "prompt", "completion", "hit_rate"}


@pytest.mark.parametrize(
    ("options", "code", "sentence"),
    [
        (["--dialog", "refrence"], 2, "did you mean 'reference'"),
        (["--copy-interval", "17"], 2, "a multiple of 16"),
        (["--retain", "2"], 2, "less than or equal to 1"),
        (["--scheduler", "asink"], 2, "is not one of 'sync', 'async'"),
    ],
)
def test_replay_of_nonsense(options, code, sentence):
    result = CliRunner().invoke(app, ["replay", *options])
    assert result.exit_code == code
    assert sentence in " ".join(result.stderr.replace("│", " ").split())
    assert "Traceback" not in result.output


def test_demo_takes_its_own_options():
    result = CliRunner().invoke(app, ["demo", "--help"])
    assert result.exit_code == 0
    assert "--once" in result.stdout


def test_tiny_model(tmp_path):
    result = CliRunner().invoke(app, ["tiny-model", str(tmp_path / "model")])
    assert result.exit_code == 0, result.output
    assert (tmp_path / "model" / "config.json").is_file()


def test_tiny_model_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    result = CliRunner().invoke(app, ["tiny-model", str(tmp_path / "file" / "x")])
    assert result.exit_code == 1
    assert "cannot be written: Not a directory." in result.stderr


def test_plugin_that_is_not_installed(monkeypatch):
    monkeypatch.setattr(activation, "NAME", "no_such_plugin")
    assert "install vllm-fork into the environment" in activation.why_inactive({})


def test_plugin_that_does_not_import(monkeypatch):
    monkeypatch.setitem(sys.modules, "vllm_fork.plugin", None)
    assert "cannot be imported" in activation.why_inactive({})


@pytest.mark.parametrize("allowed", ["vllm_fork", "other,vllm_fork"])
def test_plugin_that_is_allowed(allowed):
    assert activation.why_inactive({"VLLM_PLUGINS": allowed}) is None
