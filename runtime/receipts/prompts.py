"""The built-in prompts of receipts: eight texts of 1 to about 200 bytes.

With a byte-level tokenizer a byte is a token, so the lengths stand around the places where something is cut: 63, 64 and
65 tokens about a block of keys and a page, and two that a chunk of 64 cuts more than once.
"""

BUILT_IN_PROMPTS: tuple[str, ...] = (
    "A",
    "Two and two",
    "The order of a sum is part of its result.",
    "Sixty-three bytes stand here, one fewer than a block of 64 keys",
    "Sixty-four bytes stand in this line: exactly one block of keys..",
    "Sixty-five bytes are in this line, one more than a block of keys.",
    "Eight ranks each hold a share of the experts. A token asks eight of them, and wherever they live, their rows meet "
    "in one tree of additions.",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich; 0.1 + 0.2 = 0.30000000000000004, and (a + b) + c "
    "need not be a + (b + c). Whoever adds in the order of arrival adds another sum every day.",
)
