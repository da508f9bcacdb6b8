"""What an SVG shows, read back from its elements: cells, their groups, frames, texts."""

import re
import xml.etree.ElementTree as ET
from typing import Any, NamedTuple

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    x: float
    y: float
    width: float
    height: float
    look: str


class Cell(NamedTuple):
    box: Box
    tip: str
    texts: Any
    group: int


class Picture:
    """An SVG's cells by panel, its frames and its texts, all in the coordinates of the sheet."""

    def __init__(self, text):
        self.root = ET.fromstring(text)
        self.width, self.height = (float(self.root.get(side)) for side in ("width", "height"))
        self.panels, self.frames, self.texts = [], [], []
        self._walk(self.root, 0.0, 0.0)

    def _walk(self, element, x, y):
        moved = re.match(r"translate\(([-\d.]+) ([-\d.]+)\)", element.get("transform", ""))
        if moved:
            x, y = x + float(moved[1]), y + float(moved[2])
        look = element.get("class", "")
        if element.tag == f"{SVG}text":
            self.texts.append(words_of(element))
        if element.tag == f"{SVG}rect" and look in {"pane", "outer", "module"}:
            self.frames.append(box_of(element, x, y))
        if look == "cells":
            self.panels.append(
                [
                    Cell(box_of(found, x, y), tip.text, texts_of(holder), number)
                    for number, group in enumerate(element.findall(f"{SVG}g"))
                    for holder in (group.findall(f"{SVG}g") or [group])
                    if (tip := holder.find(f"{SVG}title")) is not None
                    for found in holder.findall(f"{SVG}rect")[:1]
                ]
            )
        for child in element:
            self._walk(child, x, y)


def words_of(element):
    return "".join(part for part in [element.text, *(child.tail for child in element)] if part)


def texts_of(element):
    return [words_of(text) for text in element.iter(f"{SVG}text")]


def box_of(element, x, y):
    left, top, width, height = (float(element.get(key)) for key in ("x", "y", "width", "height"))
    return Box(x + left, y + top, width, height, element.get("class"))


def overlap(one, other):
    return (
        min(one.x + one.width, other.x + other.width) - max(one.x, other.x) > 0.5
        and min(one.y + one.height, other.y + other.height) - max(one.y, other.y) > 0.5
    )


def inside(one, other):
    return (
        other.x <= one.x
        and one.x + one.width <= other.x + other.width
        and other.y <= one.y
        and one.y + one.height <= other.y + other.height
    )
