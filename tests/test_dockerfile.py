"""The container's recipe: linted, and its steps followed in a folder that stands for the image."""

import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import tomllib
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
FILE = ROOT / "Dockerfile"
HEALTH = "/health"


class Step(NamedTuple):
    """An instruction, and what stands behind it, its lines joined."""

    name: str
    text: str


def steps():
    lines = [line for line in FILE.read_text(encoding="utf-8").splitlines() if line[:1] != "#"]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [Step(*line.split(maxsplit=1)) for line in joined.splitlines() if line.strip()]


def last(name):
    return [step.text for step in steps() if step.name == name][-1]


def test_the_linter_finds_nothing():
    linter = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if linter is None:
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, str(FILE)], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout


def test_it_runs_as_no_root_serves_by_default_and_names_no_package_index():
    assert last("USER") == "1000"
    assert json.loads(last("ENTRYPOINT")) == ["wedlm"]
    assert json.loads(last("CMD")) == ["serve"]
    text = FILE.read_text(encoding="utf-8")
    assert re.findall(r"https?://[^'\s]+", text) == ["http://127.0.0.1:"]
    assert "index" not in text


def test_what_is_copied_is_there_and_nothing_else_is_sent_to_the_builder():
    copies = [step.text.split() for step in steps() if step.name == "COPY"]
    wanted = {path for words in copies if words[0][:6] != "--from" for path in words[:-1]}
    assert all((ROOT / path).exists() for path in wanted)
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in ignored
    assert {line[1:] for line in ignored if line.startswith("!")} == wanted


def test_its_extras_are_those_of_the_package():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (run,) = [step.text for step in steps() if "pip install" in step.text]
    named = re.search(r'"\.\[([\w,]+)\$\{extras\}\]"', run)
    accelerators = re.search(r"(\w+) \| (\w+)\)", run)
    asked = {*named[1].split(","), *accelerators.groups()}
    assert asked <= project["optional-dependencies"].keys()
    # A run on a cluster writes to a bucket, and no pod can install what the image lacks.
    assert "gcs" in asked


class Healthy(http.server.BaseHTTPRequestHandler):
    status = 200

    def do_GET(self):
        self.send_response(self.status if self.path == HEALTH else 404)
        self.end_headers()

    def log_message(self, *_):
        pass


def healthy(port):
    check = json.loads(last("HEALTHCHECK").partition("CMD")[2])
    assert check[0] == "python"
    environment = os.environ | {"WEDLM_PORT": str(port)}
    command = [sys.executable, *check[1:]]
    return subprocess.run(command, env=environment, capture_output=True).returncode == 0


def test_the_health_check_asks_the_server(monkeypatch):
    with http.server.HTTPServer(("127.0.0.1", 0), Healthy) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert healthy(server.server_port)
        monkeypatch.setattr(Healthy, "status", 503)
        assert not healthy(server.server_port)
        server.shutdown()
    assert not healthy(server.server_port)


class Image:
    """A folder in the place of an image, one for all stages, in which steps are followed."""

    def __init__(self, folder, arguments):
        self.folder, self.given = folder, arguments
        self.workdir = folder
        self.called = folder / "useradd-called"
        programs = folder / "base" / "bin"
        programs.mkdir(parents=True)
        base = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
        (programs / "python").symlink_to(base)
        (programs / "useradd").write_text(f'#!/bin/sh\necho "$@" >> {self.called}\n')
        (programs / "useradd").chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
        self.environment = kept | {"HOME": str(folder), "PATH": f"{programs}:{os.defpath}"}

    def inside(self, text):
        """Returns a text whose absolute paths lead into the folder."""
        return re.sub(r"(?<![\w./])/(?=(?:opt|src|home)\b)", f"{self.folder}/", text)

    def follow(self, step):
        if step.name == "ARG" and "=" in step.text:
            name, _, default = step.text.partition("=")
            self.environment[name] = self.given.get(name, default)
        elif step.name == "WORKDIR":
            self.workdir = Path(self.inside(step.text))
            self.workdir.mkdir(parents=True, exist_ok=True)
        elif step.name == "ENV":
            for name, value in re.findall(r"(\w+)=(\S+)", step.text):
                value = value.replace("$PATH", self.environment["PATH"])
                self.environment[name] = self.inside(value)
        elif step.name == "COPY" and not step.text.startswith("--from"):
            *sources, target = step.text.split()
            for source in map(ROOT.joinpath, sources):
                if source.is_dir():
                    without = shutil.ignore_patterns("__pycache__", "*.pyc")
                    shutil.copytree(source, self.workdir / target, ignore=without)
                else:
                    shutil.copy(source, self.workdir / target / source.name)
        elif step.name == "RUN":
            done = self.run("/bin/sh", "-c", self.inside(step.text))
            assert done.returncode == 0, done.stderr

    def run(self, *command):
        return subprocess.run(
            command, cwd=self.workdir, env=self.environment, capture_output=True, text=True
        )


def test_an_accelerator_that_there_is_not_is_refused(tmp_path):
    image = Image(tmp_path, {"ACCELERATOR": "gpu"})
    image.follow(Step("ARG", "ACCELERATOR=cpu"))
    (install,) = [step for step in steps() if "pip install" in step.text]
    with pytest.raises(AssertionError, match="expected cpu, tpu or cuda, not gpu"):
        image.follow(install)


@pytest.mark.full
def test_its_steps_make_an_image_that_decodes(tmp_path):
    image = Image(tmp_path, {})
    for step in steps():
        image.follow(step)
    assert image.called.read_text(encoding="utf-8").split()[-1] == "wedlm"
    assert image.workdir == tmp_path / "home" / "wedlm"
    assert (image.workdir / "configs" / "wedlm_8b.yaml").is_file()
    command = image.run("/bin/sh", "-c", "command -v wedlm").stdout.strip()
    assert command == str(tmp_path / "opt" / "wedlm" / "bin" / "wedlm")
    done = image.run("wedlm", "generate", "--chat", "--prompt", "Count from 2 to 30 in steps of 2.")
    assert done.returncode == 0, done.stderr
    assert "2, 4, 6" in done.stdout
    for name in ("serve", "train", "evaluate", "tokenize"):
        done = image.run("wedlm", name, "--help")
        assert done.returncode == 0, done.stderr
    in_bucket = "from wedlm_jax.host.storage import as_path; print(as_path('gs://b/run').name)"
    assert image.run("python", "-c", in_bucket).stdout == "run\n"
    where = image.run("python", "-c", "import infer.harness.command as c; print(c.TASKS)").stdout
    tasks = {path.name for path in Path(where.strip()).iterdir()}
    assert tasks == {"human_eval.yaml", "human_eval_chat.yaml"}
