#!/usr/bin/env python3
"""dev/cpu/rewrite.py - CUDA's launch syntax and dynamic shared memory as C++, for third-party sources.

    rewrite.py IN.ii OUT.ii       IN is preprocessed (dev/cpu/nvcc does that); exit code 3: nothing to rewrite

    kernel<<<grid, block, shared, stream>>>(a, b)  ->  ::cuda_cpu::on(grid, block, shared, stream)
                                                           .run(..., a, b)
    extern __shared__ float buffer[];              ->  auto* const buffer =
                                                           ::cuda_cpu::dynamic_shared<float>();

It works on preprocessed text: comments are gone, macros are expanded, #if has been decided, every include
was found by the compiler's own rules, and line markers make messages, __FILE__ and debuggers name the
original files and lines. __shared__ is expanded to "static thread_local" by then, which nothing else writes
after extern. No line break is lost, added, or moved past another, so the markers stay true.
include/cuda_cpu/rewritten.h holds the C++ side.
"""
import re
import sys

SKIPPED = re.compile(r'''
    (?:u8|[uUL])?R"(?P<mark>[^()\s\\]{0,16})\((?:.|\n)*?\)(?P=mark)"   # raw string
  | "(?:[^"\\\n]|\\.)*"                                                # string
  | (?<![0-9A-Za-z_])(?:u8|[uUL])?'(?:[^'\\\n]|\\.)+'                  # character, not the ' of 1'000
  | ^[ \t]*\#[^\n]*                                                    # line marker or pragma
  ''', re.VERBOSE | re.MULTILINE)
INTERESTING = re.compile(SKIPPED.pattern + r'| (?P<launch> <<<) | (?P<extern> \bextern\b) | (?P<brace> [{}])',
                         re.VERBOSE | re.MULTILINE)
WORD = r'[A-Za-z_$][A-Za-z0-9_$]*'
KEYWORDS = {'return', 'if', 'while', 'for', 'switch', 'else', 'do', 'case', 'throw', 'and', 'or', 'not'}
CLOSERS = {')': '(', ']': '[', '}': '{', '>': '<'}
SHARED = re.compile(r'extern\b(?P<before>[^;{}()]*(?:\(\([^;{}]*?\)\)[^;{}()]*)*)\bstatic\s+thread_local\b'
                    r'(?P<after>[^;{}=]*?)\b(?P<name>' + WORD + r')\s*\[\s*\](?P<rest>(?:\s*\[[^\];]*\])*)'
                    r'(?P<tail>[^;{}=\[\]]*);')
ATTRIBUTE = re.compile(r'__attribute__\s*\(\((?:[^()]|\([^()]*\))*\)\)|alignas\s*\((?:[^()]|\([^()]*\))*\)'
                       r'|\[\[[^\]]*\]\]')


class Refused(Exception):
    def __init__(self, position, what):
        super().__init__(what)
        self.position = position


def forward(text, start):
    """Yields (position, character) from start on, without strings, characters and line markers."""
    position = start
    while position < len(text):
        character = text[position]
        if character == '#': # a line marker begins its line; blanks before it do no harm
            match = re.compile(r'#[^\n]*').match(text, position)
        elif character in '"\'' or (character in 'RuUL' and not re.match(r'\w', text[position - 1])):
            match = SKIPPED.match(text, position)
        else:
            match = None
        if match:
            position = match.end()
            continue
        yield position, character
        position += 1


def end_of_group(text, start):
    """The position after the bracket that closes the one at start."""
    depth = 0
    for position, character in forward(text, start):
        if character in '([{':
            depth += 1
        elif character in ')]}':
            depth -= 1
            if depth == 0:
                return position + 1
    raise Refused(start, 'this bracket is never closed')


def end_of_configuration(text, start):
    """The position of the >>> that ends the configuration, and of the ( of the arguments after it."""
    depth = 0
    for position, character in forward(text, start):
        if character in '([{':
            depth += 1
        elif character in ')]}':
            depth -= 1
            if depth < 0:
                break
        elif character == ';' and depth == 0:
            break
        elif character == '>' and depth == 0:
            match = re.compile(r'>{3,}(?=\s*\()').match(text, position)
            if match: # of >>>> the last three: k<<<1, N<2>>>>(x)
                return match.end() - 3, text.index('(', match.end())
    raise Refused(start, 'no >>>( ends this launch')


def before_space(text, end):
    while end and text[end - 1].isspace():
        end -= 1
    return end


def start_of_group(text, end):
    """The position of the bracket that the one before `end` closes."""
    stack = []
    position = end
    while position:
        position -= 1
        character = text[position]
        if character in '"\'' and text[position - 1] != '\\':
            position = text.rfind(character, 0, position)
            if position < 0:
                break
        elif character == '>' and (text[position - 1] == '-' or (stack and stack[-1] != '<')):
            continue # ->, or a comparison in parentheses
        elif character in CLOSERS:
            stack.append(CLOSERS[character])
        elif character == '<' and stack and stack[-1] != '<':
            continue
        elif character in '([{<':
            if not stack or stack.pop() != character:
                break
            if not stack:
                return position
        elif character == ';':
            break
    raise Refused(end, 'cannot tell where the name of this kernel begins')


def start_of_kernel(text, end):
    """The position where the expression begins that names the kernel and ends before `end`."""
    position = before_space(text, end)
    limit = position
    while True:
        here = position
        while position and text[position - 1] in ')]>':  # arguments, index, template arguments
            bracket = text[position - 1]
            position = start_of_group(text, position)
            here = position
            position = before_space(text, position)
            if bracket == ')':
                break
        word = re.search(WORD + r'\Z', text[max(0, position - 200):position])
        if word and not (word.group() in KEYWORDS and here < limit):
            position = here = position - len(word.group())
        elif here == limit:
            raise Refused(end, 'no kernel before <<<')
        previous = before_space(text, here)
        joint = re.search(r'(::|->|\.)(\s*template)?\Z', text[max(0, previous - 40):previous])
        if not joint:
            return here
        if text[previous - 8:previous] == 'template':
            previous = before_space(text, previous - 8)
        position = previous - (1 if text[previous - 1] == '.' else 2)
        left = before_space(text, position)
        glued = left and (re.match(r'[\w$)\]>]', text[left - 1]))
        word = re.search(WORD + r'\Z', text[max(0, left - 200):left])
        if not glued or (word and word.group() in KEYWORDS):
            return position  # a leading ::
        position = left


def zeros_as_such(arguments):
    """Replaces each argument that is a literal 0 or NULL: a template would make an integer of it."""
    parts, begin, depth, angles = [], 0, 0, 0
    for position, character in forward(arguments, 0):
        if character in '([{':
            depth += 1
        elif character in ')]}':
            depth -= 1
        elif depth == 0 and character == '<' and re.match(r'\w', arguments[position - 1:position]):
            angles += 1
        elif depth == 0 and character == '>' and angles and arguments[position - 1] != '-':
            angles -= 1
        elif character == ',' and depth == 0:
            parts.append((arguments[begin:position], angles))
            begin = position + 1
    parts.append((arguments[begin:], angles))
    return ','.join(part if angles else zero_as_such(part) for part, angles in parts)


def zero_as_such(argument):
    if one_line(argument) not in ('0', '__null', '( __null )', '(__null)', '(0)'):
        return argument
    return line_breaks(argument) + '::cuda_cpu::Zero()'


def one_line(text):
    return re.sub(r'\s+', ' ', re.sub(r'^[ \t]*#[^\n]*$', '', text, flags=re.MULTILINE)).strip()


def line_breaks(text):
    """The line breaks and markers of a text that moves: they stay, for the lines after it."""
    return ''.join(re.findall(r'\n(?:[ \t]*#[^\n]*)?', text))


def rewrite_launch(text, begin, position):
    """The launch whose kernel starts at begin, its <<< at position: its C++, and the position after it."""
    kernel = text[begin:position]
    closes, opens = end_of_configuration(text, position + 3)
    end = end_of_group(text, opens)
    configuration, arguments = text[position + 3:closes], text[opens + 1:end - 1]
    name = one_line(kernel)
    find = f'::cuda_cpu::find<decltype(cuda_cpu_tag)>({name})'
    lambdas = (f'[=](auto cuda_cpu_tag) -> decltype({find}) {{ return {find}; }}, '
               f'[=](auto... cuda_cpu_a) -> decltype({name}(cuda_cpu_a...)) {{ {name}(cuda_cpu_a...); }}')
    separator = ',' if arguments.strip() else ''
    return (f'::cuda_cpu::on({line_breaks(kernel)}{configuration}).run{line_breaks(text[closes:opens])}'
            f'({lambdas}{separator}{zeros_as_such(arguments)})'), end


def rewrite_shared(match, in_function):
    kind = ATTRIBUTE.sub('', match['before'] + ' ' + match['after'])
    kind = one_line(re.sub(r'\b(static|thread_local)\b', '', kind)) + one_line(match['rest'])
    name = match['name']
    code = f'auto* const {name} = ::cuda_cpu::dynamic_shared<{kind}>();'
    if not in_function:
        code = f'static const ::cuda_cpu::DynamicShared<{kind}> {name};'
    return code + line_breaks(match.group())


def rewrite(text):
    """The text as C++; None if there is nothing to rewrite."""
    output, done = [], 0
    braces = []  # of the open ones: does it belong to a namespace or an extern "C"?
    last_brace = 0
    for match in INTERESTING.finditer(text):
        position = match.start()
        if position < done:
            continue
        if match['launch']:
            begin = start_of_kernel(text, position)
            if begin < done:
                raise Refused(position, 'a launch inside a launch')
            code, end = rewrite_launch(text, begin, position)
            output += [text[done:begin], code]
            done = end
        elif match['brace'] == '{':
            head = text[max(last_brace, text.rfind(';', last_brace, position)):position]
            braces.append(re.search(r'\bnamespace\b|\bextern\s*"C(\+\+)?"\s*\Z', head) is not None)
            last_brace = position
        elif match['brace']:
            del braces[-1:]
            last_brace = position
        elif match['extern']:
            shared = SHARED.match(text, position)
            if shared:
                output += [text[done:position], rewrite_shared(shared, not all(braces))]
                done = shared.end()
    return ''.join(output) + text[done:] if output else None


def place(text, position):
    """file:line of a position, by the line markers before it."""
    line, name = 1, '?'
    for row in text[:position].split('\n'):
        marker = re.match(r'#(?:line)? (\d+) "((?:[^"\\]|\\.)*)"', row)
        if marker:
            line, name = int(marker[1]), marker[2]
        else:
            line += 1
    return f'{name}:{line - 1}'


def main():
    if len(sys.argv) != 3:
        sys.exit('usage: rewrite.py IN.ii OUT.ii')
    with open(sys.argv[1], encoding='utf-8', errors='surrogateescape', newline='') as file:
        text = file.read()
    try:
        result = rewrite(text)
    except Refused as refused:
        sys.exit(f'{place(text, refused.position)}: error: dev/cpu/rewrite.py: {refused}')
    if result is None:
        sys.exit(3)
    with open(sys.argv[2], 'w', encoding='utf-8', errors='surrogateescape', newline='') as file:
        file.write(result)


if __name__ == '__main__':
    main()
