//! Skipping an array or an object sixty-four bytes at a time.
//!
//! A few vector instructions tell where in a block the quotes, the escapes and the structural characters are, one bit a
//! byte; what lies between two quotes is a string, and only the tokens outside of strings are looked at one by one (after
//! Langdale and Lemire, "Parsing Gigabytes of JSON per Second", 2019). All that the reader promises is checked on the
//! way. What is wrong, this does not say.

use wide::u8x16;

use super::{skip_escape, skip_number};

/// How many bytes are looked at together.
const BLOCK: usize = 64;

/// The end of the array or object that starts at `start` and nests `max_levels` levels at the most; `None` if there is
/// none, or there is something wrong with it, or with what follows it in its last block.
pub(super) fn skip_container(bytes: &[u8], start: usize, max_levels: usize) -> Option<usize> {
    if !matches!(bytes.get(start), Some(b'{' | b'[')) {
        return None;
    }
    let mut tokens = Tokens { bytes, max_levels, depth: 0, objects: 0, expected: step::VALUE };
    // Of the block before: all ones if it ends inside a string, and whether its end escapes the next byte or is part of a
    // number or a word.
    let (mut inside, mut next_is_escaped, mut in_scalar) = (0, 0, 0);
    let mut checked_escapes = start;
    let mut base = start;
    loop {
        let rest = bytes.get(base..)?;
        let block = match rest.first_chunk() {
            Some(block) => Block::new(block),
            None => Block::padded(rest),
        };
        let backslashes = block.equal(b'\\');
        let escaped = find_escaped(backslashes, &mut next_is_escaped);
        let quotes = block.equal(b'"') & !escaped;
        // With its opening quote, without the closing one.
        let strings = prefix_xor(quotes) ^ inside;
        inside = 0_u64.wrapping_sub(strings >> 63);
        for at in bits(backslashes & !escaped & strings).map(|at| base + at) {
            // The second half of a pair is checked with the first.
            if at >= checked_escapes {
                checked_escapes = skip_escape(bytes, at).ok()?;
            }
        }
        let controls = block.below(0x20);
        if controls & strings != 0 {
            return None;
        }
        if quotes | !strings != 0 {
            let structure = block.structure() & !strings;
            let mut spaces = block.equal(b' ');
            if controls != 0 {
                spaces |= block.equal(b'\n') | block.equal(b'\r') | block.equal(b'\t');
            }
            let scalars = !(strings | quotes | structure | spaces);
            let starts = scalars & !(scalars << 1 | in_scalar);
            in_scalar = scalars >> 63;
            for at in bits(structure | (quotes & strings) | starts) {
                if tokens.next(base + at)? {
                    return Some(base + at + 1);
                }
            }
        }
        base += BLOCK;
    }
}

/// What may stand next, and what a token leads to where that is not one of these.
mod step {
    pub(super) const VALUE: u8 = 0;
    /// A value, or the end of an array that is empty.
    pub(super) const FIRST: u8 = 1;
    pub(super) const KEY: u8 = 2;
    /// A member's name, or the end of an object that is empty.
    pub(super) const FIRST_KEY: u8 = 3;
    pub(super) const COLON: u8 = 4;
    /// A comma, or the end of the array or object.
    pub(super) const COMMA: u8 = 5;
    /// How many of these there are.
    pub(super) const STATES: u8 = 6;
    pub(super) const OPEN: u8 = 6;
    pub(super) const CLOSE: u8 = 7;
    /// Another value or name, by what the comma stands in.
    pub(super) const NEXT: u8 = 8;
    pub(super) const SCALAR: u8 = 9;
    pub(super) const WRONG: u8 = 10;
}

/// Where each token leads that starts with a byte, from each state.
static STEPS: [[u8; 256]; step::STATES as usize] = steps();

const fn steps() -> [[u8; 256]; step::STATES as usize] {
    use step::*;
    let mut steps = [[WRONG; 256]; STATES as usize];
    let mut state = 0;
    while state < STATES as usize {
        let row = &mut steps[state];
        match state as u8 {
            VALUE | FIRST => {
                *row = [SCALAR; 256];
                (row[b'{' as usize], row[b'[' as usize], row[b'"' as usize]) = (OPEN, OPEN, COMMA);
                (row[b'}' as usize], row[b']' as usize]) = (WRONG, WRONG);
                (row[b':' as usize], row[b',' as usize]) = (WRONG, WRONG);
                if state as u8 == FIRST {
                    row[b']' as usize] = CLOSE;
                }
            }
            KEY => row[b'"' as usize] = COLON,
            FIRST_KEY => (row[b'"' as usize], row[b'}' as usize]) = (COLON, CLOSE),
            COLON => row[b':' as usize] = VALUE,
            _ => (row[b',' as usize], row[b'}' as usize], row[b']' as usize]) = (NEXT, CLOSE, CLOSE),
        }
        state += 1;
    }
    steps
}

/// The grammar: which token may follow which.
struct Tokens<'a> {
    bytes: &'a [u8],
    max_levels: usize,
    depth: usize,
    /// One bit a level: whether it is an object.
    objects: u128,
    /// What may stand next.
    expected: u8,
}

impl Tokens<'_> {
    /// Takes the token that starts at `at`; whether it ends the whole.
    #[inline]
    fn next(&mut self, at: usize) -> Option<bool> {
        let byte = *self.bytes.get(at)?;
        let next = STEPS[usize::from(self.expected)][usize::from(byte)];
        if next < step::STATES {
            self.expected = next;
            return Some(false);
        }
        let in_object = self.objects & 1 == 1;
        self.expected = match next {
            step::NEXT if in_object => step::KEY,
            step::NEXT => step::VALUE,
            step::OPEN if self.depth < self.max_levels => {
                self.depth += 1;
                self.objects = self.objects << 1 | u128::from(byte == b'{');
                if byte == b'{' { step::FIRST_KEY } else { step::FIRST }
            }
            step::CLOSE if in_object == (byte == b'}') => {
                self.depth -= 1;
                self.objects >>= 1;
                if self.depth == 0 {
                    return Some(true);
                }
                step::COMMA
            }
            step::SCALAR if self.is_scalar(at) => step::COMMA,
            _ => return None,
        };
        Some(false)
    }

    /// Whether a number or a word stands at `at`, and nothing else is grown together with it.
    fn is_scalar(&self, at: usize) -> bool {
        let word = |word: &[u8]| self.bytes[at..].starts_with(word).then_some(at + word.len());
        let end = match self.bytes[at] {
            b't' => word(b"true"),
            b'f' => word(b"false"),
            b'n' => word(b"null"),
            b'-' | b'0'..=b'9' => skip_number(self.bytes, at).ok(),
            _ => None,
        };
        // Other tokens start with themselves, so that the grammar knows what to make of them.
        let ends = |b: Option<&u8>| {
            matches!(b, None | Some(b',' | b'}' | b']' | b':' | b'{' | b'[' | b'"' | b' ' | b'\n' | b'\r' | b'\t'))
        };
        end.is_some_and(|end| ends(self.bytes.get(end)))
    }
}

/// Appends a block of text, escaped for the inside of a JSON string; `false`, and nothing is appended, if there are control
/// characters in it.
pub(super) fn push_escaped_block(out: &mut Vec<u8>, text: &[u8; BLOCK]) -> bool {
    let block = Block::new(text);
    if block.below(0x20) != 0 {
        return false;
    }
    let special = block.equal(b'"') | block.equal(b'\\');
    if special == 0 {
        out.extend_from_slice(text);
        return true;
    }
    let mut escaping = Escaping { from: [0; BLOCK + PIECE], at: 0, to: [0; 2 * BLOCK + PIECE], length: 0 };
    escaping.from[..BLOCK].copy_from_slice(text);
    for at in bits(special) {
        escaping.copy_until(at);
        escaping.to[escaping.length] = b'\\';
        escaping.length += 1;
        // The special byte itself begins the next run.
    }
    escaping.copy_until(BLOCK);
    out.extend_from_slice(&escaping.to[..escaping.length]);
    true
}

/// What is copied at once, whether or not as much is needed: that takes no call.
const PIECE: usize = 16;

/// A block on its way to its escaped text.
struct Escaping {
    from: [u8; BLOCK + PIECE],
    at: usize,
    to: [u8; 2 * BLOCK + PIECE],
    length: usize,
}

impl Escaping {
    #[inline]
    fn copy_until(&mut self, end: usize) {
        while self.at < end {
            let piece = &self.from[self.at..self.at + PIECE];
            self.to[self.length..self.length + PIECE].copy_from_slice(piece);
            let copied = (end - self.at).min(PIECE);
            self.at += copied;
            self.length += copied;
        }
    }
}

/// Sixty-four bytes.
struct Block([u8x16; 4]);

impl Block {
    fn new(bytes: &[u8; BLOCK]) -> Self {
        let (parts, _) = bytes.as_chunks::<16>();
        Block([u8x16::new(parts[0]), u8x16::new(parts[1]), u8x16::new(parts[2]), u8x16::new(parts[3])])
    }

    /// With spaces after fewer bytes.
    fn padded(bytes: &[u8]) -> Self {
        let mut padded = [b' '; BLOCK];
        padded[..bytes.len()].copy_from_slice(bytes);
        Block::new(&padded)
    }

    #[inline]
    fn mask(&self, which: impl Fn(u8x16) -> u8x16) -> u64 {
        let [a, b, c, d] = self.0.map(|part| u64::from(which(part).to_bitmask()));
        a | b << 16 | c << 32 | d << 48
    }

    #[inline]
    fn equal(&self, byte: u8) -> u64 {
        self.mask(|part| part.simd_eq(u8x16::splat(byte)))
    }

    #[inline]
    fn below(&self, byte: u8) -> u64 {
        self.mask(|part| part.simd_lt(u8x16::splat(byte)))
    }

    /// Brackets, braces, colons and commas.
    #[inline]
    fn structure(&self) -> u64 {
        self.mask(|part| {
            // Brackets differ from braces by this one bit, and nothing else becomes a brace by it.
            let braces = part | u8x16::splat(0x20);
            braces.simd_eq(u8x16::splat(b'{'))
                | braces.simd_eq(u8x16::splat(b'}'))
                | part.simd_eq(u8x16::splat(b':'))
                | part.simd_eq(u8x16::splat(b','))
        })
    }
}

/// The positions of the bits that are set.
#[inline]
fn bits(mut mask: u64) -> impl Iterator<Item = usize> {
    std::iter::from_fn(move || {
        let at = (mask != 0).then(|| mask.trailing_zeros() as usize);
        mask &= mask.wrapping_sub(1);
        at
    })
}

/// Each bit says whether the number of bits up to it, itself included, is odd.
fn prefix_xor(mut mask: u64) -> u64 {
    for shift in [1, 2, 4, 8, 16, 32] {
        mask ^= mask << shift;
    }
    mask
}

/// The bytes that a backslash before them escapes. `next` says whether that is so for the first byte, and then for the
/// first after these.
#[inline]
fn find_escaped(backslashes: u64, next: &mut u64) -> u64 {
    const EVEN: u64 = 0x5555_5555_5555_5555;
    if backslashes == 0 {
        return std::mem::take(next);
    }
    let backslashes = backslashes & !*next;
    let follows = backslashes << 1 | *next;
    // Adding carries through a row of backslashes to its end, where it shows whether the row is of an odd length.
    let odd_starts = backslashes & !EVEN & !follows;
    let (even_ends, carries) = odd_starts.overflowing_add(backslashes);
    *next = u64::from(carries);
    (EVEN ^ even_ends << 1) & follows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::json::skip_value;
    use proptest::prelude::*;

    /// Both ways through a text find the same end.
    fn agree(text: &str, max_levels: usize) -> Result<(), TestCaseError> {
        let slowly = skip_value(text.as_bytes(), 0, max_levels, 0).ok();
        let is_container = text.starts_with(['{', '[']);
        prop_assert_eq!(skip_container(text.as_bytes(), 0, max_levels), slowly.filter(|_| is_container), "{}", text);
        Ok(())
    }

    /// This way finds no end that the other does not find.
    fn deny(text: &str) -> Result<(), TestCaseError> {
        let end = skip_container(text.as_bytes(), 0, 128);
        prop_assert!(end.is_none() || end == skip_value(text.as_bytes(), 0, 128, 0).ok(), "{} {:?}", text, end);
        Ok(())
    }

    fn json() -> impl Strategy<Value = String> {
        let scalar = prop_oneof![
            Just("null".to_owned()),
            Just("true".to_owned()),
            Just("false".to_owned()),
            Just("-0.5e+3".to_owned()),
            Just("1e400".to_owned()),
            any::<i64>().prop_map(|number| number.to_string()),
            any::<String>().prop_map(|text| serde_json::to_string(&text).unwrap()),
            r#""(\\\\|\\"|\\n|\\u0041|\\ud83d\\ude00|\\ud83d|\\ude00|[a-z{}\[\]:, ]){0,40}""#,
        ];
        scalar.prop_recursive(6, 200, 12, |inner| {
            let space = || "[ \n\t]{0,2}";
            prop_oneof![
                (proptest::collection::vec((space(), inner.clone()), 0..12), space()).prop_map(|(items, end)| {
                    let items: Vec<_> = items.into_iter().map(|(space, item)| format!("{space}{item}")).collect();
                    format!("[{}{end}]", items.join(","))
                }),
                (proptest::collection::vec((space(), "[a-z\\\\\"]{0,9}", inner), 0..12), space()).prop_map(
                    |(items, end)| {
                        let items: Vec<_> = items
                            .into_iter()
                            .map(|(space, key, item)| {
                                format!("{space}{}{space}:{item}", serde_json::to_string(&key).unwrap())
                            })
                            .collect();
                        format!("{{{}{end}}}", items.join(","))
                    }
                ),
            ]
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(500))]

        #[test]
        fn documents_end_where_the_slow_way_finds_their_end(text in json(), after in "[ ,x]{0,3}", max_levels in 0..8_usize) {
            agree(&format!("{text}{after}"), max_levels)?;
        }

        #[test]
        fn what_is_broken_is_no_document(
            text in json(),
            at in any::<prop::sample::Index>(),
            piece in prop_oneof![Just(""), Just("\\"), Just("\""), Just("]"), Just("}"), Just("{"), Just("["), Just(","), Just(":"),
                Just("\u{1}"), Just("\n"), Just("x"), Just("1"), Just("0"), Just("-"), Just("é"), Just("\\u"), Just("\\ud800")],
            cut in 0..3_usize,
        ) {
            let at = at.index(text.len() + 1);
            let at = (0..=at).rev().find(|at| text.is_char_boundary(*at)).unwrap();
            let end = (at + cut).min(text.len());
            let end = (end..=text.len()).find(|end| text.is_char_boundary(*end)).unwrap();
            deny(&format!("{}{piece}{}", &text[..at], &text[end..]))?;
        }

        #[test]
        fn any_row_of_tokens_is_no_document_by_chance(text in r#"[\[{]([\[\]{}:,"\\ \n]|"a"|1|true|nul|-|\\u00e9|1\.5e3){0,90}"#) {
            deny(&text)?;
        }
    }

    #[test]
    fn a_row_of_backslashes_may_cross_from_block_to_block() {
        for before in 0..140 {
            for backslashes in 0..140 {
                let text = format!("[\"{}{}\"]", "a".repeat(before), "\\".repeat(backslashes));
                let slowly = skip_value(text.as_bytes(), 0, 8, 0).ok();
                assert_eq!(skip_container(text.as_bytes(), 0, 8), slowly, "{text}");
            }
        }
    }
}
