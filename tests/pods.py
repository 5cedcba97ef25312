"""Pods on this machine: podman in namespaces of its own, an image of the running Python; no registry, no network."""

from __future__ import annotations

import copy
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from manifests import K8S, Object, instructions

ROOT = K8S.parent
IMAGE = "realmops:local"  # what the overlay for one machine asks for
COMMIT = "c0ffee" * 6 + "c0de"
NEEDED = ("podman", "crun", "catatonit", "unshare", "nsenter")
PACKAGES = f"/opt/realmops/lib/python{sys.version_info.major}.{sys.version_info.minor}/site-packages"
CONFIGURATION = """
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=1000:1000"]
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "crun"
"""
# Everything that podman keeps outside its storage is in memory of this mount namespace. With the second hierarchy of
# a machine that has cgroups of both versions, crun takes it for one of version 2. It ends with its standard input.
INSIDE = """
umount /sys/fs/cgroup/unified 2> /dev/null
mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm
echo there
read
"""


class CannotRun(Exception):
    """This machine cannot run containers; the message says why."""


class Podman:
    """podman whose pods, storage, network and locks end with this object, or with the process that made it.

    A context manager that raises CannotRun.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._environment = {**os.environ}
        for name, text in {
            "CONTAINERS_CONF": CONFIGURATION,
            "CONTAINERS_STORAGE_CONF": (
                f'[storage]\ndriver = "overlay"\ngraphroot = "{folder}/storage"\nrunroot = "{folder}/run"\n'
            ),
        }.items():
            self._environment[name] = str(folder / name)
            (folder / name).write_text(text)

    def __enter__(self) -> Podman:
        if missing := [name for name in NEEDED if shutil.which(name) is None]:
            raise CannotRun(f"there is no {', '.join(missing)}: 'make podman' installs it on Debian")
        if os.geteuid():
            raise CannotRun("only root can run it")
        namespaces = ["unshare", "--mount", "--net", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self._inside = subprocess.Popen(
            [*namespaces, "bash", "-c", INSIDE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert self._inside.stdout
        assert self._inside.stderr
        if self._inside.stdout.readline() != b"there\n":
            message = self._inside.stderr.read().decode()
            self._end()
            raise CannotRun(f"no namespaces of its own: {message.strip()}")
        unshare = self._inside.pid
        self._pid = Path(f"/proc/{unshare}/task/{unshare}/children").read_text().strip()
        try:
            self._try()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def __call__(self, *words: str) -> str:
        """Return what a podman command prints; AssertionError if it fails."""
        done = self._run("podman", *words)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stderr or done.stdout}"
        return done.stdout

    def fails(self, *words: str) -> bool:
        return self._run("podman", *words).returncode != 0

    def play(self, one: Object) -> None:
        """``podman kube play``, a pod without a network."""
        file = self.folder / f"{one['metadata']['name']}.json"
        file.write_text(json.dumps(one))
        network = [] if one["kind"] == "PersistentVolumeClaim" else ["--network", "none"]
        self("kube", "play", *network, str(file))

    def state(self, container: str, field: str) -> str:
        return self("inspect", container, "--format", f"{{{{.{field}}}}}").strip()

    def _run(self, *words: str) -> subprocess.CompletedProcess[str]:
        enter = ["nsenter", "--target", self._pid, "--mount", "--net", "--pid", "--"]
        return subprocess.run(
            [*enter, *words], capture_output=True, text=True, env=self._environment, timeout=120, check=False
        )

    def _try(self) -> None:
        """A container with what the manifests ask for, made of nothing but a static program."""
        root = self.folder / "smallest"
        root.mkdir()
        shutil.copy(shutil.which("catatonit") or "", root / "try")
        limits = ["--read-only", "--user", "10001:10001", "--cap-drop", "all", "--memory", "64m", "--network", "none"]
        done = self._run("podman", "run", "--rm", *limits, "--rootfs", str(root), "/try", "--version")
        if done.returncode:
            raise CannotRun(f"podman runs no container: {done.stderr.strip()}")

    def _end(self) -> None:
        assert self._inside.stdin
        with suppress(BrokenPipeError):
            self._inside.stdin.close()  # ends the first process, and with it all others of its namespace
        self._inside.wait()
        for stream in (self._inside.stdout, self._inside.stderr):
            assert stream
            stream.close()
        groups = Path("/sys/fs/cgroup")
        for parent in (*groups.glob("libpod_parent"), *groups.glob("*/libpod_parent")):
            for folder in sorted([parent, *parent.rglob("*/")], reverse=True):
                with suppress(OSError):
                    folder.rmdir()
        for name in ("storage", "run", "smallest"):
            shutil.rmtree(self.folder / name, ignore_errors=True)


def build_image(podman: Podman, folder: Path) -> None:
    """The image as the Dockerfile's last stage makes it, on a base that holds what this Python is made of.

    /opt/realmops has the package itself; what it depends on is mounted (``with_packages``).
    """
    base = folder / "base"
    copy_python(base)
    here = base / "opt" / "realmops"
    package = here / "src" / "realmops"
    shutil.copytree(ROOT / "src" / "realmops", package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("k8s", "pipelines"):  # as setup.py does it
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    (base / PACKAGES.lstrip("/")).mkdir(parents=True)
    (here / "bin").mkdir()
    (here / "bin" / "python").symlink_to(interpreter())
    script = here / "bin" / "realmops"
    script.write_text("#!/opt/realmops/bin/python\nfrom realmops.cli import main\nmain()\n")
    script.chmod(0o755)
    (here / "pyvenv.cfg").write_text(f"home = {interpreter().parent}\n")
    (base / "tmp").mkdir()
    for place in [base, *base.rglob("*/")]:
        if not place.is_symlink():
            place.chmod(0o755)
    (base / "tmp").chmod(0o1777)

    found = instructions()
    last = found[max(n for n, (word, _) in enumerate(found) if word == "FROM") + 1 :]
    kept = [(word, rest) for word, rest in last if not rest.startswith("--from")]
    for word, rest in kept:
        for source in rest.split()[:-1] if word == "COPY" else ():
            (shutil.copytree if (ROOT / source).is_dir() else shutil.copy)(ROOT / source, folder / source)
    lines = [("FROM", "scratch"), ("COPY", "base/ /"), ("ENV", "PATH=/bin PYTHONPATH=/opt/realmops/src"), *kept]
    (folder / "Containerfile").write_text("".join(f"{word} {rest}\n" for word, rest in lines))
    podman("build", "--isolation", "chroot", "--quiet", "--build-arg", f"COMMIT={COMMIT}", "--tag", IMAGE, str(folder))
    shutil.rmtree(base)


def interpreter() -> Path:
    """The program behind the virtual environment's python."""
    return Path(sys.executable).resolve()


def copy_python(base: Path) -> None:
    """The interpreter, its standard library, and the shared libraries that they and torch are linked with."""
    library = Path(sysconfig.get_path("stdlib"))
    unused = ("site-packages", "dist-packages", "test", "idlelib", "ensurepip", "config-*", "_tkinter*", "__pycache__")
    shutil.copytree(library, base / library.relative_to("/"), symlinks=True, ignore=shutil.ignore_patterns(*unused))
    torch = Path(sysconfig.get_path("purelib"), "torch", "lib")
    modules = [path for path in library.glob("lib-dynload/*.so") if not path.name.startswith("_tkinter")]
    command = ["ldd", *map(str, [interpreter(), *modules, *torch.glob("*.so*")])]
    printed = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    needed = {Path(path) for path in re.findall(r"^\t(?:.* => )?(/\S+) \(", printed, re.MULTILINE)}
    for path in {interpreter(), Path("/etc/ld.so.cache"), *needed}:
        if not path.is_relative_to(torch) and path.exists():
            (base / path.relative_to("/")).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, base / path.relative_to("/"))


def with_packages(spec: Object) -> Object:
    """A pod's spec with what the package depends on: mounted, as the image would have to hold gigabytes of it."""
    spec = copy.deepcopy(spec)
    source = {"path": sysconfig.get_path("purelib"), "type": "Directory"}
    spec["volumes"].append({"name": "packages", "hostPath": source})
    for container in spec["containers"]:
        container["volumeMounts"].append({"name": "packages", "mountPath": PACKAGES, "readOnly": True})
    return spec


def give_to_group(volume: Path, group: int) -> None:
    """Apply ``fsGroup`` as the kubelet does; podman does not."""
    for path in [volume, *volume.rglob("*")]:
        os.chown(path, -1, group)
        path.chmod(path.stat().st_mode | (0o2070 if path.is_dir() else 0o060))
