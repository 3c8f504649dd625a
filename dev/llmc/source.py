"""Finds places in C source by the names that stand there (dev/llmc/patch.py).

    source = Source(text)
    f = source.function("gpt2_update")            # its one definition: f.parameters, f.body
    call = source.call("cudaMemcpy", f.body, having="params_memory")
    source.statement(call.start)                  # from its first character to its semicolon

Everything works on `code`: the text with comments and the contents of strings and characters blanked, of the same
length, so that offsets agree. What is not there, or not there exactly once, raises Missing, which says what was
looked for and how often it was found. Line ends may be of either kind; nothing else of the text is touched.
"""

import bisect
import re
from collections import namedtuple

Span = namedtuple("Span", "start end")
Call = namedtuple("Call", "start end arguments")   # from the name to behind the closing parenthesis
Function = namedtuple("Function", "start body parameters")   # body: between the braces

BLANKED = re.compile(r'//(?:\\\r?\n|[^\n])*|/\*.*?(?:\*/|\Z)|R"([^()\\\s]{0,16})\(.*?\)\1"'
                     r'|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.S)


class Missing(Exception):
    """An anchor that is not there exactly once."""


def blank(match):
    text = match[0]
    if text[0] in "\"'":   # the quotes stay, so that an argument is not empty
        return text[0] + re.sub(r"[^\n]", " ", text[1:-1]) + text[-1]
    return re.sub(r"[^\n]", " ", text)


def exactly_one(found, what):
    if len(found) != 1:
        raise Missing(f"{what}: found {len(found)} times, expected once" if found else f"{what}: not found")
    return found[0]


class Source:
    def __init__(self, text):
        self.text = text
        self.code = BLANKED.sub(blank, text)
        self.lines = [0] + [match.end() for match in re.finditer(r"\n", text)]

    def line(self, offset):
        return bisect.bisect_right(self.lines, offset)

    # ---- brackets

    def closing(self, opening):
        """Behind the bracket that closes the one at `opening`."""
        pairs = {"(": ")", "{": "}", "[": "]"}
        close, depth = pairs[self.code[opening]], 0
        for match in re.compile("[" + re.escape(self.code[opening] + close) + "]").finditer(self.code, opening):
            depth += 1 if match[0] != close else -1
            if depth == 0:
                return match.end()
        raise Missing(f"line {self.line(opening)}: a {self.code[opening]!r} that nothing closes")

    def split(self, start, end):
        """The parts between commas of one level, without the blanks around them: [(text, Span)]."""
        parts, first, i = [], start, start
        while i < end:
            if self.code[i] in "([{":
                i = self.closing(i)
                continue
            if self.code[i] == ",":
                parts.append(Span(first, i))
                first = i + 1
            i += 1
        if self.code[first:end].strip() or parts:
            parts.append(Span(first, end))
        return [(self.text[a:b].strip(), Span(a, b)) for a, b in parts]

    def block_around(self, offset):
        """The innermost { } around an offset: Span from the opening bracket to behind the closing one."""
        depth = 0
        for i in range(offset - 1, -1, -1):
            if self.code[i] == "}":
                depth += 1
            elif self.code[i] == "{":
                depth -= 1
                if depth < 0:
                    return Span(i, self.closing(i))
        raise Missing(f"line {self.line(offset)}: not inside of a block")

    # ---- what has a name

    def find(self, pattern, within=None, what=None):
        """The one match of a regular expression in the code."""
        start, end = within or (0, len(self.code))
        found = list(re.compile(pattern).finditer(self.code, start, end))
        return exactly_one(found, what or f"/{pattern}/")

    def calls(self, name, within=None, having=""):
        """Calls of a function (not its definition) whose arguments have a word in them."""
        start, end = within or (0, len(self.code))
        found = []
        word = re.escape(name)   # first, and what stands before it only then: that is ten times as fast
        for match in re.compile(rf"{word}(?<!\w{word})\s*\(").finditer(self.code, start, end):
            behind = self.closing(match.end() - 1)
            inside = Span(match.end(), behind - 1)
            if re.search(rf"\b{re.escape(having)}\b" if having else "", self.code[inside.start:inside.end]):
                found.append(Call(match.start(), behind, self.split(*inside)))
        return found

    def call(self, name, within=None, having=""):
        return exactly_one(self.calls(name, within, having),
                           f"the call of {name}" + (f" with {having}" if having else ""))

    def function(self, name):
        """The definition of a function: its parameters' names and its body."""
        found = []
        for call in self.calls(name):
            brace = re.compile(r"\s*(?:const\s*|noexcept\s*)*\{").match(self.code, call.end)
            if brace:
                names = [re.search(r"(\w+)\s*(?:\[[^]]*\]\s*)?(?:=.*)?$", self.code[a:b].rstrip(), re.S)
                         for _, (a, b) in call.arguments]
                found.append(Function(call.start, Span(brace.end(), self.closing(brace.end() - 1) - 1),
                                      [match[1] if match else "" for match in names]))
        return exactly_one(found, f"the definition of {name}")

    def statement(self, offset):
        """The simple statement around an offset, its semicolon included."""
        start = offset
        depth = 0
        while start > 0:
            c = self.code[start - 1]
            if c in ")]":
                depth += 1
            elif c in "([":
                depth -= 1
            elif depth <= 0 and c in ";{}":
                break
            start -= 1
        start += len(self.code[start:offset]) - len(self.code[start:offset].lstrip())
        # behind `if (...)`, `else` and the like
        while True:
            match = re.compile(r"(?:(?:else\s+)?(?:if|for|while)\s*(?=\()|else\b\s*)").match(self.code, start)
            if not match:
                break
            start = self.closing(match.end()) if self.code[match.end()] == "(" else match.end()
            start += len(self.code[start:]) - len(self.code[start:].lstrip())
        # labels and directives are none of it
        while self.code[start] == "#":
            start = re.compile(r"(?:\\\r?\n|[^\n])*\n").match(self.code, start).end()
            start += len(self.code[start:]) - len(self.code[start:].lstrip())
        i = offset if offset > start else start
        while self.code[i] != ";":
            i = self.closing(i) if self.code[i] in "([{" else i + 1
        return Span(start, i + 1)

    def product_end(self, offset):
        """Where a product of names, numbers, calls and brackets ends; offset: behind one of its asterisks."""
        while True:
            factor = re.compile(r"\s*(?:\w+(?:\s*(?:->|\.|::)\s*\w+)*)?").match(self.code, offset)
            offset = factor.end()
            while self.code[offset] in "([":
                offset = self.closing(offset)
            if not factor[0].strip() and offset == factor.end():
                raise Missing(f"line {self.line(offset)}: a product that goes on with {self.code[offset]!r}")
            more = re.compile(r"\s*\*").match(self.code, offset)
            if not more:
                return offset
            offset = more.end()

    def function_around(self, offset):
        """The outermost { } around an offset, with the parameters in front of it."""
        block = self.block_around(offset)
        while True:
            try:
                block = self.block_around(block.start)
            except Missing:
                break
        return Span(max(self.code.rfind(c, 0, block.start) for c in ";}#") + 1, block.end)

    def if_around(self, offset):
        """The whole if (...) { } whose block is the innermost around an offset."""
        block = self.block_around(offset)
        head = re.compile(r"\bif\s*\(")
        for match in head.finditer(self.code, max(0, block.start - 400), block.start):
            if not self.code[self.closing(match.end() - 1):block.start].strip():
                return Span(match.start(), block.end)
        raise Missing(f"line {self.line(block.start)}: the block is not one of an if")

    def for_around(self, offset):
        """The innermost for (...) { } around an offset: (Span of the whole, its loop variable)."""
        while True:
            block = self.block_around(offset)
            for match in re.compile(r"\bfor\s*\(").finditer(self.code, max(0, block.start - 400), block.start):
                if not self.code[self.closing(match.end() - 1):block.start].strip():
                    variable = re.compile(r"\s*(?:[\w:]+\s+)*(\w+)\s*=").match(self.code, match.end())
                    if variable:
                        return Span(match.start(), block.end), variable[1]
            offset = block.start

    # ---- whole lines

    def whole_lines(self, span):
        """The span with its line's indentation and the line end, where nothing else stands on these lines."""
        start, end = span
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", end)
        line_end = len(self.text) if line_end < 0 else line_end
        if self.text[line_start:start].strip() or self.code[end:line_end].strip():
            return None
        return Span(line_start, min(line_end + 1, len(self.text)))

    def indentation(self, offset):
        line_start = self.text.rfind("\n", 0, offset) + 1
        return re.match(r"[ \t]*", self.text[line_start:])[0]
