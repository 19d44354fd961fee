"""Seeded texts that tokenizers get wrong: code, scripts, emoji, blanks of every kind, control characters."""

import random

WORDS = """the quick Brown fox JUMPS over it's we'll they'RE don't I'm naïve façade Straße 你好世界 日本の首都は 안녕하세요
Привет שלום مرحبا สวัสดี नमस्ते ... !!! -- ` \\n <|im_end <| im_start|> </s 's '' " 'S ’s $x$ a_b-c </div>
Ġ Ċ ▁ ² ½ Ⅷ ٣ １２ 0 1 42 12345 3.14 1,000,000 http://a.b/c?d=e&f=%20 😀 🤣 👩‍👩‍👧‍👦 🇫🇷 👍🏽""".split()
BLANKS = ["\t", "\t\t", "\n", "\n\n", "\r\n", "\r", "\x0b", "\x0c", "\x85", "\u00a0", "\u2028", "\u2029", "\u3000"]
BLANKS += [" " * count for count in (1, 2, 3, 7, 15, 33)]
CODE = [
    "def f(x):\n    return x ** 2  # why\n",
    "for (int i = 0; i < n; ++i) {\n\t\tx[i] += 1;\n\t}\n",
    '{"k": [1, 2]}',
]
COMBINING = ["e\u0301", "\u1e9b\u0323", "\u2126", "\ufeff", "\u200b"]
RARE = ["\x00", "\x04", "\x06", "\x13", "\x14", "\x16", "\x1d", "\x7f", "\ufffd", "\U0010ffff", "\U000e0041"]
PIECES = [*WORDS, *BLANKS, *CODE, *COMBINING, *RARE]


def texts(count: int, seed: int, longest: int = 12) -> list[str]:
    """`count` texts of 1 to `longest` pieces each, half of them with blanks between."""
    random_source = random.Random(seed)
    return [
        random_source.choice(["", " "]).join(random_source.choices(PIECES, k=random_source.randint(1, longest)))
        for _ in range(count)
    ]
