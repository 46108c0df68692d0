#!/usr/bin/env python3
"""The headers' plain comments are their documentation: turns them into Doxygen's form.

`//` becomes `///`, a trailing one `///<`, `/*` becomes `/**`. The opening comment belongs to the file, not to the
namespace that follows. Indented lines of a comment are tables of shapes and stay lines, as code; those that go on with
a list item stay text. What is private in a class is left out. A line `/* ---- Name ---- */` begins a group of
declarations.
"""

import re
import sys
from pathlib import Path


def main() -> None:
    """Writes the header given to standard output."""
    text = Path(sys.argv[1]).read_text()
    if text.startswith("//"):
        print("/// @file")
    elif text.startswith("/*"):
        text = text.replace("/*", "/* @file\n *", 1)
    text = re.sub(r"^ *private:\n(.*\n)*?(?= *\};)", "", text, flags=re.M)
    in_table = in_list = in_group = False
    margin = ""
    for line in text.splitlines():
        group = re.match(r"/\* -{4,} (.+?) -{4,}( \*/)?$", line)
        if in_group and (group or line.startswith("#ifdef __cplusplus")):
            print("/** @} */")
        in_group = bool(group) or (in_group and not line.startswith("#ifdef __cplusplus"))
        if group:
            print(f"/** @name {group[1]} */\n/** @{{ */" + ("" if group[2] else "\n/**"))
            continue
        match = re.match(r"( *)//( *)(.*)$", line)
        indented = bool(match) and len(match[2]) >= 3
        item = bool(match) and match[3].startswith("- ")
        in_list = item or (in_list and indented)
        table = indented and not in_list
        if table != in_table:
            margin = match[1] if match else margin
            print(f"{margin}/// @code{{.unparsed}}" if table else f"{margin}/// @endcode")
        in_table = table
        if match:
            print(f"{match[1]}///{match[2]}{match[3]}")
            continue
        line = re.sub(r"([;,}{].*[^:/]) // (?!NOLINT)(.*)$", r"\1 ///< \2", line)
        line = re.sub(r"([;,]) +/\* (.*) \*/$", r"\1 /**< \2 */", line)
        print(re.sub(r"^( *)/\* (?!-)", r"\1/** ", line))


main()
