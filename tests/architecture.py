"""The house as its imports show it: the rooms from roof to ground, and what stands on what.

python tests/architecture.py            # print the drawing
python tests/architecture.py --write    # put it into CONTRIBUTING.md
"""

import ast
import functools
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
BEGIN, END = "<!-- the drawing, by tests/architecture.py -->\n```\n", "```\n<!-- end -->"
WORDS_AT = 20
"""The column at which it says what is in a room."""


def tree_of(source):
    """What a file says."""
    return parsed(source.read_text())


@functools.cache
def parsed(text):
    """A text's tree: each file is asked for by several tests."""
    return ast.parse(text)


class House:
    """A package of Python files: a room is a folder of it, or a file beside the folders."""

    def __init__(self, package):
        self.package = package
        self.modules = {self.name_of(source): source for source in sorted(package.rglob("*.py"))}
        self.rooms = {
            name: source
            for name, source in self.modules.items()
            if source.stem == "__init__" or source.parent == package
            if name != package.name and source.stem != "__main__"
        }

    def name_of(self, source):
        """The name of the module in a file."""
        parts = source.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(part for part in parts if part != "__init__")

    def imports_of(self, source):
        """The modules of ours that a file imports, wherever in it."""
        own = self.package.name
        for node in ast.walk(tree_of(source)):
            if isinstance(node, ast.Import):
                yield from (name.name for name in node.names if name.name.startswith(own))
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(own):
                names = [f"{node.module}.{name.name}" for name in node.names]
                yield from (name if name in self.modules else node.module for name in names)

    def below(self, room):
        """The neighbours of a room, which lie in the same folder, that it imports."""
        parent = room.rpartition(".")[0]
        found = {
            imported[: f"{imported}.".index(".", len(parent) + 1)]
            for module, source in self.modules.items()
            if f"{module}.".startswith(f"{room}.")
            for imported in self.imports_of(source)
            if imported.startswith(f"{parent}.")
        }
        return (found & self.rooms.keys()) - {room}

    def within(self, parent):
        """The rooms that lie in a folder, from the roof: each above those that it imports.

        Of rooms that import each other, the one that imports fewest is the lowest.
        """
        inside = [name for name in self.rooms if name.rpartition(".")[0] == parent]
        left = {name: self.below(name) for name in inside}
        used = set().union(*left.values())
        falling = []
        while left:
            missing = {name: len(below & left.keys()) for name, below in left.items()}
            free = sorted((name for name in left if not missing[name]), reverse=True)
            for name in free or [min(left, key=lambda name: (missing[name], name))]:
                falling.insert(0, name)
                del left[name]
        return sorted(falling, key=used.__contains__)  # what nobody imports is the roof

    def drawing(self):
        """All rooms, a line for each, and one for what it imports."""
        return "".join(f"{line}\n" for line in self._lines(self.package.name))

    def _lines(self, parent, depth=0):
        rooms = self.within(parent)
        for place, room in enumerate(rooms):
            source, below = self.rooms[room], self.below(room)
            name = room.rpartition(".")[2] + ("/" if source.stem == "__init__" else ".py")
            says = ast.get_docstring(tree_of(source)).splitlines()[0]
            yield f"{'  ' * depth}{name}".ljust(WORDS_AT) + says
            imported = {
                "on": [other for other in rooms[place + 1 :] if other in below and not depth],
                "and up, on": [other for other in rooms[:place] if other in below],
            }
            for word, others in imported.items():
                names = ", ".join(other.rpartition(".")[2] for other in others)
                if names:
                    yield f"{' ' * WORDS_AT}{word} {names}"
            yield from self._lines(room, depth + 1)


def with_drawing(page, drawing):
    """A page with another drawing between the two marks."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}{drawing}{END}{after}"


def main(arguments):
    drawing = House(ROOT / "hypercomm").drawing()
    if arguments == ["--write"]:
        PAGE.write_text(with_drawing(PAGE.read_text(), drawing))
    else:
        print(drawing, end="")


if __name__ == "__main__":
    main(sys.argv[1:])
