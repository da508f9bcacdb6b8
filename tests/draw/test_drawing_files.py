"""Pictures as files: kinds, files that exist, and PNG with and without what it needs."""

import struct
import sys
import warnings

import pytest

from hypercomm import RankLayout, errors
from hypercomm.draw import png
from hypercomm.draw.drawing import KINDS

DRAWING = RankLayout.parse("tp=2,cp=2,dp=2").draw(on=8)


# What is written is what the methods return; the ending says which, in any case.
@pytest.mark.parametrize("name", ["grid.svg", "GRID.SVG", "grid.txt", "grid.html"])
def test_save(tmp_path, name):
    file = tmp_path / name
    DRAWING.save(file)
    text = file.read_text(encoding="utf-8")
    made = {
        "svg": DRAWING.svg(),
        "html": DRAWING.html(),
        "txt": DRAWING.text(width=100, color=False) + "\n",
    }
    assert text == made[name.lower().rpartition(".")[2]]


# A file that exists is kept, byte by byte, unless it is to be replaced.
def test_existing(tmp_path):
    file = tmp_path / "grid.svg"
    file.write_text("mine")
    with pytest.raises(FileExistsError, match="exists, and is kept; force=True"):
        DRAWING.save(file)
    assert file.read_text() == "mine"
    DRAWING.save(str(file), force=True)
    assert file.read_text(encoding="utf-8") == DRAWING.svg()
    folder = tmp_path / "folder.svg"
    folder.mkdir()
    with pytest.raises(errors.FileKeptError, match="is a folder"):
        DRAWING.save(folder, force=True)


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("grid.pdf", f"ends in no kind of picture that can be written: use {next(iter(KINDS))}"),
        ("grid", "ends in no kind of picture"),
        ("grid.sgv", "did you mean '.svg'?"),
        ("", "ends in no kind of picture"),
        ("no/such/folder/grid.svg", "cannot be written: there is no folder"),
        (3, "path must be that of a file, got 3"),
        ("a\0b.svg", "cannot be written: embedded null byte"),
        ("x" * 300 + ".svg", "cannot be written: File name too long"),
    ],
)
def test_bad_files(tmp_path, monkeypatch, path, sentence):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(errors.DrawingError) as caught:
        DRAWING.save(path)
    assert sentence in str(caught.value)
    assert list(tmp_path.iterdir()) == []


# A PNG is twice as large as the SVG, so that letters are sharp.
def test_png():
    pytest.importorskip("resvg_py")
    content = DRAWING.png()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    svg = DRAWING.svg()
    assert f'width="{width // 2}"' in svg
    assert f'height="{height // 2}"' in svg


# Without resvg-py there is a sentence that says what to install, and no file.
def test_no_resvg(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(errors.MissingPackageError, match=r"pip install 'hypercomm\[draw\]'"):
        DRAWING.save(tmp_path / "grid.png")
    assert list(tmp_path.iterdir()) == []


# Without the machine's fonts those of matplotlib are taken; else a warning says so, beside a PNG.
@pytest.mark.parametrize("has_matplotlib", [True, False])
def test_no_fonts(monkeypatch, has_matplotlib):
    resvg = pytest.importorskip("resvg_py")
    if has_matplotlib:
        pytest.importorskip("matplotlib")
    whole = resvg.svg_to_bytes

    def without_fonts(**given):
        return whole(**given, skip_system_fonts=True)

    monkeypatch.setattr(resvg, "svg_to_bytes", without_fonts)
    if not has_matplotlib:
        monkeypatch.setattr(png.importlib.util, "find_spec", lambda _: None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        content = DRAWING.png()
    assert content[:4] == b"\x89PNG"
    told = [str(warning.message) for warning in caught]
    assert [("no fonts were found" in text) for text in told] == ([] if has_matplotlib else [True])
    assert (content == whole(svg_string=DRAWING.svg(), zoom=2, skip_system_fonts=True)) == (
        not has_matplotlib
    )


# Pictures of more pixels than memory has room for are refused.
def test_too_large():
    pytest.importorskip("resvg_py")
    with pytest.raises(errors.DrawingError, match="is too large; save it as SVG or HTML"):
        png.png_of('<svg width="100000" height="100000"></svg>')
    with pytest.raises(errors.DrawingError, match="cannot be written as PNG"):
        png.png_of('<svg width="10" height="10"><')
