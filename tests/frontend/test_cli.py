"""The command as a user meets it: its own process, its output, its exit code."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import zmq
from typer.testing import CliRunner
from vllm.entrypoints.cli.serve import ServeSubcommand

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


WOULD_HAVE_RUN = "the server would have run"
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


def test_model_that_vllm_cannot_read_is_one_sentence():
    done = run("vllm-fork", "serve", "no-such/model", "--port", "0", **FREE)
    assert done.returncode == 2
    sentence = "vllm-fork: vLLM cannot read the model no-such/model: "
    assert done.stderr.splitlines()[-1].startswith(sentence)
    assert "Traceback" not in done.stdout + done.stderr


@pytest.fixture
def bad_folder(tmp_path):
    """Of a model, whose ``config.json`` is what the test says."""

    def bad_folder(content: str | None) -> str:
        if content is None:
            (tmp_path / "config.json").mkdir()
        else:
            (tmp_path / "config.json").write_text(content)
        return str(tmp_path)

    return bad_folder


@pytest.fixture
def quiet_environment(monkeypatch):
    """The commands set variables: they go with the test."""
    monkeypatch.setenv(SERVE_ENV, "0")
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    for name, value in FREE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setattr(plugin, "serving_pid", None)
    monkeypatch.setattr(plugin, "is_engine_configured", False)


@pytest.mark.usefixtures("quiet_environment")
class TestServe:
    """In this process, for what is told before the server runs."""

    @staticmethod
    def serve(*arguments: str) -> str:
        """What is said in the end."""

        def run_server(parsed: object) -> None:
            raise AssertionError(WOULD_HAVE_RUN)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(ServeSubcommand, "cmd", staticmethod(run_server))
            result = CliRunner().invoke(app, ["serve", *arguments])
        assert isinstance(result.exception, SystemExit), result.exception
        assert result.exit_code == 2
        return result.stderr.splitlines()[-1]

    @pytest.mark.parametrize(
        ("arguments", "sentence"),
        [
            (["/no/such/model"], "There is no folder /no/such/model: name that of a"),
            (["no/such/model"], "There is no folder no/such/model: name that of a mod"),
            ([], "No model is named: name its folder"),
            ([""], "No model is named: name its folder"),
            (["--model"], "--model has no value: name the model's folder"),
            (["--model", "/no/such/model"], "There is no folder /no/such/model: name"),
            (["--port", "1", "--model=/no/such/model"], "There is no folder /no/such/"),
            ([__file__], f"{__file__} is a file: name the folder that the model is in"),
            (["m", "--tokenizer", "/no/such"], "There is no folder /no/such for --tok"),
            (["m", "--config"], "vLLM cannot use these arguments: No config file spec"),
            (["m", "--config", "/no/such.yaml"], "vLLM cannot use these arguments: ["),
            (["m", "--enable-auto-tool-choice"], "vLLM cannot use these arguments: --"),
            (["m", "--chat-template", "/no/such"], "vLLM cannot use these arguments: "),
            (
                ["m", "--uds", "/no/such/socket"],
                "There is no folder /no/such for --uds",
            ),
            (["m", "--uds", __file__], f"--uds {__file__} exists already: stop the"),
            (["m", "--port", "65536"], "--port is 65536: expected a number from 0 to"),
            (["m", "--ssl-keyfile", "/no"], "There is no file /no for --ssl-keyfile."),
        ],
    )
    def test_bad_arguments(self, arguments, sentence):
        assert self.serve(*arguments).startswith(f"vllm-fork: {sentence}")

    @pytest.mark.parametrize("argument", ["--nosuch", "extra"])
    def test_what_vllm_s_parser_refuses(self, argument):
        said = self.serve("m", argument)
        assert said == f"vllm: error: unrecognized arguments: {argument}"

    @pytest.mark.parametrize(
        ("content", "complaint"),
        [
            ("", "is not JSON (Expecting value: line 1 column 1 (char 0)): expected"),
            ("junk", "is not JSON (Expecting value: "),
            ("[1]", "is not an object: expected a model's configuration."),
            (None, "cannot be read: Is a directory."),
        ],
    )
    def test_folder_without_a_configuration(self, bad_folder, content, complaint):
        folder = bad_folder(content)
        sentence = f"vllm-fork: {folder}/config.json {complaint}"
        assert self.serve(folder, "--port", "0").startswith(sentence)

    def test_taken_address(self):
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = str(server.getsockname()[1])
            said = self.serve("m", "--host", "127.0.0.1", "--port", port)
        sentence = f"vllm-fork: The server cannot listen on 127.0.0.1:{port} (address "
        assert said.startswith(sentence)

    @pytest.mark.parametrize(
        ("name", "content", "sentence"),
        [
            (
                "model.safetensors",
                None,
                "There are no weights in {folder}: expect",
            ),
            (
                "model.safetensors",
                b"version https://git-lfs",
                "{path} is no safetensor",
            ),
            (
                "model.safetensors",
                b"",
                "{path} is no safetensors file (a Git LFS ",
            ),
            (
                "tokenizer.json",
                None,
                "There is no tokenizer in {folder}: name one",
            ),
            (
                "tokenizer.json",
                b"version https://git-lfs",
                "{path} is not JSON (a Git L",
            ),
        ],
    )
    def test_folder_without_all_files(
        self, hybrid_model, tmp_path, name, content, sentence
    ):
        folder = tmp_path / "model"
        shutil.copytree(hybrid_model, folder)
        path = folder / name
        path.unlink() if content is None else path.write_bytes(content)
        said = self.serve(str(folder), "--port", "0")
        assert said.startswith(
            f"vllm-fork: {sentence.format(folder=folder, path=path)}"
        )

    @pytest.mark.parametrize(
        "elsewhere",
        [["--load-format", "dummy"], ["--tokenizer", "m"], ["--skip-tokenizer-init"]],
    )
    def test_files_that_are_not_looked_for(self, hybrid_model, tmp_path, elsewhere):
        folder = tmp_path / "model"
        shutil.copytree(hybrid_model, folder)
        is_dummy = "dummy" in elsewhere
        (folder / ("model.safetensors" if is_dummy else "tokenizer.json")).unlink()
        said = self.serve(str(folder), "--port", "0", *elsewhere)
        assert said.endswith(WOULD_HAVE_RUN)

    def test_what_vllm_refuses_before_there_is_an_engine(self):
        said = self.serve("m", "--port", "0")
        assert said == f"vllm-fork: vLLM cannot use these arguments: {WOULD_HAVE_RUN}"

    def test_what_goes_wrong_later_keeps_its_traceback(self, monkeypatch):
        monkeypatch.setattr(plugin, "is_engine_configured", True)
        with pytest.raises(AssertionError, match=WOULD_HAVE_RUN):
            self.serve("m", "--port", "0")


def doctor(*arguments: str) -> tuple[dict, int]:
    """In this process: loading vLLM takes seconds."""
    result = CliRunner().invoke(app, ["doctor", "--json", *arguments])
    return json.loads(result.stdout.splitlines()[-1]), result.exit_code


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

    @pytest.mark.parametrize("flag", [["--model={}"], ["--model", "{}"]])
    def test_model_by_flag(self, hybrid_model, flag):
        """As vLLM takes it: anywhere among the arguments."""
        named = [part.format(hybrid_model) for part in flag]
        report, code = doctor("--port", "0", *named, "--prefix-match-unit", "16")
        assert (report["retention"], code) == ("on", 0)

    @pytest.mark.parametrize("flag", [["--model=Qwen/Qwen3-0.6B"], ["--model", ""]])
    def test_model_by_flag_that_is_vllm_s_default(self, flag, monkeypatch):
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        report, _ = doctor(*flag, "--port", "0")
        is_named = report["reason"].startswith("vLLM cannot read the model Qwen/Qwen3-")
        assert is_named is (flag != ["--model", ""])

    @pytest.mark.parametrize(
        "arguments", [["--model"], ["m", "--config", "no.yaml"], ["m", "--config"]]
    )
    def test_arguments_that_vllm_cannot_use(self, arguments):
        report, code = doctor(*arguments)
        assert (report["retention"], code) == ("unknown", 1)
        (finding,) = [f for f in report["findings"] if f["subject"] == "arguments"]
        assert finding["sentence"] == report["reason"]

    def test_configuration_of_the_wrong_types(self, bad_folder, hybrid_model):
        config = json.loads((hybrid_model / "config.json").read_text())
        folder = bad_folder(json.dumps(config | {"hidden_size": "abc"}))
        report, code = doctor(folder, "--port", "0")
        assert code == 1
        assert "'hidden_size' expected int, got str" in report["reason"]
        assert "\n" not in report["reason"]

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
