"""Builds the stand-ins for CUDA and NCCL for an environment, and says which variables make programs run on them.

    eval "$(python tests/fakecuda/build.py)"        makes the newest row's environment, too (scripts/versions.py)

What is built stays in a folder named after a hash of the sources and of the environment. Nothing in the environment is
changed: the libraries have the SONAMEs of NVIDIA's and are preloaded, so that torch's own references find them; torch
opens some by path, too, the first on sys.path, where links to ours come first.

Rules of this file: standard library only; it runs in any Python, not in the environment's. Needs g++ and nm.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parents[1] / "scripts"), str(HERE.parents[1])]

import versions  # noqa: E402

from deadpool_plugin.versions import NEWEST  # noqa: E402

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deadpool_plugin"
RUNTIME = ("streams.cpp", "memory.cpp", "device.cpp", "driver.cpp")
LIBRARIES = ("libcudart.so.13", "libcuda.so.1", "libnvidia-ml.so.1", "libnccl.so.2")
OPENED_BY_PATH = {"libcudart.so.13": "nvidia/cu13/lib", "libnccl.so.2": "nvidia/nccl/lib"}
NOT_THERE = {"cu": 801, "nvml": 3, "nccl": 5}
"""What an entry point returns that the stand-ins do not have: cudaErrorNotSupported (the driver's number is the same),
NVML_ERROR_NOT_SUPPORTED, ncclInvalidUsage."""
STUB = """extern "C" int {name}() {{
  static bool said = false;
  if (!said) fputs("[fakecuda] not there: {name}\\n", stderr);
  said = true;
  return {code};
}}
"""
SETTINGS = {
    "CUDA_VISIBLE_DEVICES": "0",
    "FAKECUDA": "1",
    "OMP_NUM_THREADS": "1",  # one team for each thread of a stream would be too many
    "PYTHONWARNINGS": "ignore",
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCHDYNAMO_DISABLE": "1",  # it compiles for the card
}


class Missing(Exception):
    """Something this machine does not have; the message says what, and what to do."""


def prepared() -> tuple[Path, dict[str, str]]:
    """The interpreter of the newest row's environment, and the variables of a program that runs on the stand-ins.

    Raises: Missing without a compiler or that Python.
    """
    if lacking := [tool for tool in ("g++", "nm") if shutil.which(tool) is None]:
        raise Missing(f"no {' and no '.join(lacking)} on PATH; expected a C++ compiler: install g++")
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        python = versions.environment(NEWEST, CACHE / "envs", CACHE / "install.txt")
    except versions.Unavailable as error:
        raise Missing(f"{error}; expected one on PATH or under pyenv") from None
    except subprocess.CalledProcessError:
        raise Missing(f"pip could not install the environment; all it said is in {CACHE / 'install.txt'}") from None
    return python, variables(python, built(python))


def variables(python: Path, place: Path) -> dict[str, str]:
    def before(name: str, *first: Path) -> str:
        return os.pathsep.join([*map(str, first), *filter(None, [os.environ.get(name)])])

    return SETTINGS | {
        "LD_PRELOAD": before("LD_PRELOAD", *(place / name for name in LIBRARIES)),
        "PATH": before("PATH", place / "bin", python.parent),
        "PYTHON": str(python),
        "PYTHONPATH": before("PYTHONPATH", place / "site"),
        "VIRTUAL_ENV": str(python.parent.parent),
    }


def built(python: Path) -> Path:
    """The folder of the libraries for the environment of `python`, built now unless they are there."""
    words = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
    sources = sorted(path for path in HERE.rglob("*") if path.is_file() and not is_beside(path))
    digest = hashlib.sha256(str(packages).encode())
    digest.update((packages / "torch" / "version.py").read_bytes())
    digest.update(subprocess.run(["g++", "--version"], capture_output=True, check=True).stdout)
    for path in sources:
        digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes())
    place = CACHE / "fakecuda" / digest.hexdigest()[:12]
    if place.exists():
        return place
    place.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=place.parent) as name:
        build(packages, Path(name))
        with contextlib.suppress(OSError):  # somebody else was faster
            Path(name).rename(place)
            Path(name).mkdir()
    return place


def is_beside(path: Path) -> bool:
    """Return whether what is built does not depend on this file."""
    return path.suffix in (".md", ".pyc") or path.name in ("control.py", "run.py") or path.name.startswith("test_")


def build(packages: Path, out: Path) -> None:
    print(f"[fakecuda] building in {out.parent} (a minute)", file=sys.stderr, flush=True)
    header = (packages / "nvidia/cu13/include/driver_types.h").read_text()
    named = re.findall(r"^\s+(cudaSuccess|cudaError\w+)\s*=\s*(\d+)", header, re.M)
    (out / "errors.inc").write_text("".join(f"NAMED({name}, {value})\n" for name, value in named))
    # the headers of the toolkit's part that torch's wheels leave out come with Triton
    folders = ["nvidia/cu13/include", "nvidia/nccl/include", "triton/backends/nvidia/include"]
    torch = ["torch/include", "torch/include/torch/csrc/api/include"]
    cuda = ["-std=c++17", "-O1", "-g", "-fPIC", f"-I{out}", *(f"-isystem{packages / one}" for one in folders)]
    with ThreadPoolExecutor(2) as pool:
        kernels = pool.submit(
            compile, HERE / "kernels.cpp", out / "kernels.so",
            [*cuda, "-std=c++20", "-w", *(f"-isystem{packages / one}" for one in torch), "-shared"],
            [f"-L{packages / 'torch/lib'}", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"],
        )  # fmt: skip
        for name in (*RUNTIME, "nccl.cpp"):
            pool.submit(compile, HERE / name, out / f"{name}.o", [*cuda, "-c"]).result()
        link(out, imports(packages))
        kernels.result()
    shutil.copytree(HERE / "site", out / "site", ignore=shutil.ignore_patterns("__pycache__"))
    (out / "kernels.so").rename(out / "site" / "kernels.so")
    shutil.copytree(HERE / "bin", out / "bin")
    for library, folder in OPENED_BY_PATH.items():
        (out / "site" / folder).mkdir(parents=True)
        (out / "site" / folder / library).symlink_to(os.path.relpath(out / library, out / "site" / folder))


def compile(source: Path, result: Path, options: list[str], libraries: Sequence[str] = ()) -> None:
    subprocess.run(["g++", *options, str(source), "-o", str(result), *libraries], check=True)


def link(out: Path, wanted: set[str]) -> None:
    objects = {"cudart": [out / f"{name}.o" for name in RUNTIME], "nccl": [out / "nccl.cpp.o"]}
    for library, own in objects.items():
        is_nccl = library == "nccl"
        missing = {name for name in wanted if name.startswith("nccl") == is_nccl} - symbols("--defined-only", own)
        (out / f"{library}_rest.cpp").write_text("#include <cstdio>\n" + "".join(map(stub, sorted(missing))))
        (out / "exports").write_text("libcudart.so.13 { global: cu*; __cuda*; nvml*; fakecuda*; local: *; };\n")
        soname = LIBRARIES[3 if is_nccl else 0]
        more = [f"-L{out}", f"-l:{LIBRARIES[0]}"] if is_nccl else [f"-Wl,--version-script={out / 'exports'}", "-ldl"]
        shared(out / soname, [*own, out / f"{library}_rest.cpp"], ["-fPIC", *more, "-lpthread"])
    for soname in LIBRARIES[1:3]:  # opened by name, and searched with what they need
        shared(out / soname, [], ["-Wl,--no-as-needed", f"-L{out}", f"-l:{LIBRARIES[0]}"])


def shared(library: Path, sources: list[Path], options: list[str]) -> None:
    words = ["-shared", f"-Wl,-soname,{library.name}", "-Wl,-rpath,$ORIGIN"]
    subprocess.run(["g++", *words, "-o", str(library), *map(str, sources), *options], check=True)


def imports(packages: Path) -> set[str]:
    """Entry points of CUDA, its driver, NVML and NCCL that torch refers to, or looks up by name."""
    libraries = [*(packages / "torch" / "lib").glob("*.so"), *(packages / "torch").glob("_C*.so")]
    found = symbols("--undefined-only", libraries, "-D")
    looked_up = (packages / "torch/include/c10/cuda/driver_api.h").read_text()
    found |= set(re.findall(r"_\((cu[A-Z]\w+|nvml\w+)\b", looked_up))
    return {name for name in found if re.match(r"(__cuda|cuda|cu(?!File)|nccl|nvml)[A-Z]\w*$", name)}


def symbols(which: str, files: list[Path], *options: str) -> set[str]:
    said = subprocess.run(["nm", *options, which, *map(str, files)], capture_output=True, text=True, check=True).stdout
    return {line.split()[-1].partition("@")[0] for line in said.splitlines() if len(line.split()) > 1}


def stub(name: str) -> str:
    code = next(code for prefix, code in NOT_THERE.items() if name.lstrip("_").startswith(prefix))
    return STUB.format(name=name, code=code)


def main() -> int:
    try:
        _, wanted = prepared()
    except Missing as error:
        sys.exit(f"fakecuda: {error}")
    for name, value in sorted(wanted.items()):
        print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
