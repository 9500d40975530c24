//! JSON as text: one pass that checks and slices, and never builds a tree.
//!
//! What the proxy relays (ids, arguments, schemas, results) must arrive as it was sent, so it is kept as the
//! sender's text. [`Reader`] walks a document once, hands out the members that we act on, and skips the rest;
//! on the way it refuses what would break the other end: syntax errors, nesting past a limit, numbers that no
//! `f64` can hold (`1e400` becomes `Infinity` in Python and JavaScript), and lone surrogates. serde's `RawValue`
//! keeps text too, but checks neither depth nor numbers.

mod scan;

use std::borrow::Cow;
use std::ops::ControlFlow;

/// The deepest nesting that can be configured: [`Reader`] keeps one bit a level in a `u128`.
pub const MAX_DEPTH: usize = 128;

/// Why a text is refused. `at` is a byte offset into the text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JsonError {
    /// Not JSON (RFC 8259).
    #[error("invalid JSON at byte {at}: {what}")]
    Syntax {
        /// Where.
        at: usize,
        /// What was expected, or what is wrong.
        what: &'static str,
    },
    /// JSON of another kind than is needed here.
    #[error("{what} at byte {at}")]
    Kind {
        /// Where.
        at: usize,
        /// What was expected.
        what: &'static str,
    },
    /// Arrays and objects nested deeper than allowed.
    #[error("JSON is nested deeper than {limit} levels (at byte {at})")]
    TooDeep {
        /// The limit.
        limit: usize,
        /// Where the level too many begins.
        at: usize,
    },
    /// A number that overflows an IEEE 754 double.
    #[error("the number at byte {at} does not fit a double")]
    NumberRange {
        /// Where.
        at: usize,
    },
    /// Half of a UTF-16 surrogate pair in a `\u` escape: it stands for no character.
    #[error("the \\u escape at byte {at} is half of a surrogate pair")]
    Surrogate {
        /// Where.
        at: usize,
    },
}

fn syntax<T>(at: usize, what: &'static str) -> Result<T, JsonError> {
    Err(JsonError::Syntax { at, what })
}

/// A pull parser over one document that returns values as slices of the text.
///
/// The caller drives it: `begin_object`, then `next_key` and one of `value` or `begin_object` until `next_key`
/// answers `None`; at last [`Reader::end`]. Each byte is looked at once.
#[derive(Debug)]
pub struct Reader<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
    max_depth: usize,
    /// An object was just opened: no comma stands before its first key.
    fresh: bool,
}

impl<'a> Reader<'a> {
    /// A reader at the start of `text`, which may nest `max_depth` levels (at most [`MAX_DEPTH`]).
    pub fn new(text: &'a str, max_depth: usize) -> Self {
        Reader { text, at: 0, depth: 0, max_depth: max_depth.min(MAX_DEPTH), fresh: false }
    }

    /// The first byte of the next value, without consuming it; `None` at the end of the text.
    pub fn peek(&mut self) -> Option<u8> {
        self.at = skip_space(self.text.as_bytes(), self.at);
        self.text.as_bytes().get(self.at).copied()
    }

    /// Where the next value starts. Give it to [`Reader::since`] to get the value's text after walking it.
    pub fn mark(&mut self) -> usize {
        self.at = skip_space(self.text.as_bytes(), self.at);
        self.at
    }

    /// The text from `mark` to here.
    pub fn since(&self, mark: usize) -> &'a str {
        &self.text[mark..self.at]
    }

    /// Enters an object.
    ///
    /// # Errors
    /// [`JsonError`] if the next value is not an object, or nests too deep.
    pub fn begin_object(&mut self) -> Result<(), JsonError> {
        match self.peek() {
            Some(b'{') => {}
            None => return syntax(self.at, "expected an object"),
            Some(_) => return Err(JsonError::Kind { at: self.at, what: "an object is required" }),
        }
        if self.depth >= self.max_depth {
            return Err(JsonError::TooDeep { limit: self.max_depth, at: self.at });
        }
        self.depth += 1;
        self.at += 1;
        self.fresh = true;
        Ok(())
    }

    /// The next member's name; its value is next. `None` after the last one: the object is left.
    ///
    /// # Errors
    /// [`JsonError`] if the text is not JSON here.
    pub fn next_key(&mut self) -> Result<Option<Cow<'a, str>>, JsonError> {
        let fresh = std::mem::take(&mut self.fresh);
        match self.peek() {
            Some(b'}') => {
                self.at += 1;
                self.depth -= 1;
                return Ok(None);
            }
            Some(b',') if !fresh => {
                self.at += 1;
                self.peek();
            }
            _ if fresh => {}
            _ => return syntax(self.at, "expected ',' or '}'"),
        }
        let bytes = self.text.as_bytes();
        if bytes.get(self.at) != Some(&b'"') {
            return syntax(self.at, "expected a member name");
        }
        let start = self.at;
        let plain = plain_run(bytes, start + 1);
        let key = if bytes.get(plain) == Some(&b'"') {
            self.at = plain + 1;
            Cow::Borrowed(&self.text[start + 1..plain])
        } else {
            self.at = skip_string(bytes, start)?;
            decode_string(&self.text[start..self.at])
        };
        if self.peek() != Some(b':') {
            return syntax(self.at, "expected ':'");
        }
        self.at += 1;
        Ok(Some(key))
    }

    /// Skips one whole value and returns its text, without the space around it.
    ///
    /// # Errors
    /// [`JsonError`] if the value is not acceptable JSON.
    pub fn value(&mut self) -> Result<&'a str, JsonError> {
        let start = self.mark();
        let bytes = self.text.as_bytes();
        // What it does not get through is looked at again, to say what is wrong.
        self.at = match scan::skip_container(bytes, start, self.max_depth.saturating_sub(self.depth)) {
            Some(end) => end,
            None => skip_value(bytes, start, self.max_depth, self.depth)?,
        };
        Ok(self.since(start))
    }

    /// Checks that nothing but space is left.
    ///
    /// # Errors
    /// [`JsonError::Syntax`] if something follows the document.
    pub fn end(&mut self) -> Result<(), JsonError> {
        match self.peek() {
            None => Ok(()),
            Some(_) => syntax(self.at, "unexpected text after the document"),
        }
    }
}

/// Calls `each` with the name and the text of every member of `object`, in order.
///
/// # Errors
/// [`JsonError`] if `object` is not the text of an object.
pub fn members<'a>(object: &'a str, mut each: impl FnMut(&str, &'a str)) -> Result<(), JsonError> {
    let mut reader = Reader::new(object, MAX_DEPTH);
    reader.begin_object()?;
    while let Some(key) = reader.next_key()? {
        each(&key, reader.value()?);
    }
    reader.end()
}

/// The value of the last member called `name` of `object`; `None` if there is none, or it is not an object.
pub fn member<'a>(object: &'a str, name: &str) -> Option<&'a str> {
    let mut found = None;
    members(object, |key, value| {
        if key == name {
            found = Some(value);
        }
    })
    .ok()?;
    found
}

/// Calls `each` with the text of every element of `array`, in order.
///
/// # Errors
/// [`JsonError`] if `array` is not the text of an array.
pub fn elements<'a>(array: &'a str, max_depth: usize, mut each: impl FnMut(&'a str)) -> Result<(), JsonError> {
    walk_elements(array, max_depth, |element| {
        each(element);
        ControlFlow::Continue(())
    })
}

/// The texts of all elements of `array`; `None` if there are more than `limit`, which is found out without reading on.
///
/// # Errors
/// [`JsonError`] if `array`, as far as it is read, is not the text of an array.
pub fn few_elements(array: &str, max_depth: usize, limit: usize) -> Result<Option<Vec<&str>>, JsonError> {
    let mut elements = Vec::new();
    let mut are_few = true;
    walk_elements(array, max_depth, |element| {
        are_few = elements.len() < limit;
        if !are_few {
            return ControlFlow::Break(());
        }
        elements.push(element);
        ControlFlow::Continue(())
    })?;
    Ok(are_few.then_some(elements))
}

fn walk_elements<'a>(
    array: &'a str,
    max_depth: usize,
    mut each: impl FnMut(&'a str) -> ControlFlow<()>,
) -> Result<(), JsonError> {
    let mut reader = Reader::new(array, max_depth);
    if reader.peek() != Some(b'[') {
        return Err(JsonError::Kind { at: reader.at, what: "an array is required" });
    }
    reader.at += 1;
    reader.depth = 1;
    if reader.peek() == Some(b']') {
        reader.at += 1;
        return reader.end();
    }
    loop {
        if each(reader.value()?).is_break() {
            return Ok(());
        }
        match reader.peek() {
            Some(b',') => reader.at += 1,
            Some(b']') => {
                reader.at += 1;
                return reader.end();
            }
            _ => return syntax(reader.at, "expected ',' or ']'"),
        }
    }
}

/// Checks a whole document.
///
/// # Errors
/// [`JsonError`] if it is not acceptable JSON.
pub fn check(text: &str, max_depth: usize) -> Result<(), JsonError> {
    let mut reader = Reader::new(text, max_depth);
    reader.value()?;
    reader.end()
}

/// Whether a value's text is that of an object.
pub fn is_object(value: &str) -> bool {
    value.starts_with('{')
}

/// Whether a value's text is that of a string.
pub fn is_string(value: &str) -> bool {
    value.starts_with('"')
}

/// The characters of a JSON string, from its text with the quotes. Borrowed unless it holds an escape.
pub fn decode_string(text: &str) -> Cow<'_, str> {
    let inner = &text[1..text.len() - 1];
    if memchr::memchr(b'\\', inner.as_bytes()).is_none() {
        return Cow::Borrowed(inner);
    }
    Cow::Owned(serde_json::from_str(text).expect("the reader has checked this string's escapes"))
}

/// The decoded string if `value` is a string's text.
pub fn as_string(value: &str) -> Option<Cow<'_, str>> {
    is_string(value).then(|| decode_string(value))
}

/// One spelling for all texts of the same number: sign, digits without zeros at either end, `e`, exponent.
/// `1`, `1.0` and `1e0` share one; no floating point is involved, so no two numbers do.
///
/// `None` if the exponent has more than 18 digits, zeros before them aside: such a number is known by its text alone.
pub fn canonical_number(number: &str) -> Option<String> {
    let (sign, rest) = match number.strip_prefix('-') {
        Some(rest) => ("-", rest),
        None => ("", number),
    };
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let digits = digits.trim_start_matches('0');
    if digits.is_empty() {
        return Some("0".to_owned());
    }
    let exponent_digits = exponent.trim_start_matches(['+', '-']).trim_start_matches('0');
    if exponent_digits.len() > 18 {
        return None;
    }
    let trimmed = digits.trim_end_matches('0');
    let exponent = exponent.parse::<i64>().ok()? - i64::try_from(fraction.len()).ok()?
        + i64::try_from(digits.len() - trimmed.len()).ok()?;
    Some(format!("{sign}{trimmed}e{exponent}"))
}

/// Whether two texts are the same number. Numbers without a canonical spelling are it only if their texts are the same.
pub fn is_same_number(a: &str, b: &str) -> bool {
    a == b || canonical_number(a).is_some_and(|a| canonical_number(b) == Some(a))
}

/// Whether a number's value is whole: `1`, `1.0` and `1e2` are, `1.5` and `1e-1` are not.
pub fn is_whole_number(number: &str) -> bool {
    if number.bytes().all(|b| b.is_ascii_digit() || b == b'-') {
        return true;
    }
    canonical_number(number).is_some_and(|c| c == "0" || !c.contains("e-"))
}

/// Appends `text` as a JSON string with its quotes.
pub fn push_string(out: &mut Vec<u8>, text: &str) {
    out.push(b'"');
    push_escaped(out, text);
    out.push(b'"');
}

/// Appends `text` escaped for the inside of a JSON string. Runs without a special byte are copied as blocks.
pub fn push_escaped(out: &mut Vec<u8>, text: &str) {
    let (blocks, rest) = text.as_bytes().as_chunks();
    for block in blocks {
        if !scan::push_escaped_block(out, block) {
            push_escaped_runs(out, block);
        }
    }
    push_escaped_runs(out, rest);
}

fn push_escaped_runs(out: &mut Vec<u8>, bytes: &[u8]) {
    let mut start = 0;
    loop {
        let at = plain_run(bytes, start);
        out.extend_from_slice(&bytes[start..at]);
        let Some(&byte) = bytes.get(at) else { return };
        push_escape(out, byte);
        start = at + 1;
    }
}

fn push_escape(out: &mut Vec<u8>, byte: u8) {
    const HEX: &[u8; 16] = b"0123456789abcdef";
    match byte {
        b'"' => out.extend_from_slice(b"\\\""),
        b'\\' => out.extend_from_slice(b"\\\\"),
        b'\n' => out.extend_from_slice(b"\\n"),
        b'\r' => out.extend_from_slice(b"\\r"),
        b'\t' => out.extend_from_slice(b"\\t"),
        0x08 => out.extend_from_slice(b"\\b"),
        0x0c => out.extend_from_slice(b"\\f"),
        _ => {
            out.extend_from_slice(&[b'\\', b'u', b'0', b'0', HEX[usize::from(byte >> 4)], HEX[usize::from(byte & 15)]])
        }
    }
}

/// Appends `json`, a checked value, pretty-printed with two spaces as `JSON.stringify(value, null, 2)` would
/// lay it out, escaped for the inside of a JSON string. Only white space differs from the text that was sent.
///
/// OpenClaw drops the text copy of `structuredContent` only if it is laid out like this.
pub fn push_pretty_escaped(out: &mut Vec<u8>, json: &str) {
    let bytes = json.as_bytes();
    let mut indent = 0;
    let mut at = 0;
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b' ' | b'\t' | b'\n' | b'\r' => at += 1,
            b'"' => {
                let plain = plain_run(bytes, at + 1);
                if bytes.get(plain) == Some(&b'"') {
                    // Nothing in it is escaped, so nothing but its quotes is to be.
                    out.extend_from_slice(b"\\\"");
                    out.extend_from_slice(&bytes[at + 1..plain]);
                    out.extend_from_slice(b"\\\"");
                    at = plain + 1;
                } else {
                    let end = skip_string(bytes, at).unwrap_or(bytes.len());
                    push_escaped(out, &json[at..end]);
                    at = end;
                }
            }
            b'{' | b'[' => {
                out.push(byte);
                at = skip_space(bytes, at + 1);
                if matches!(bytes.get(at), Some(b'}' | b']')) {
                    out.push(bytes[at]);
                    at += 1;
                } else {
                    indent += 1;
                    push_new_line(out, indent);
                }
            }
            b'}' | b']' => {
                indent -= 1;
                push_new_line(out, indent);
                out.push(byte);
                at += 1;
            }
            b',' => {
                out.push(b',');
                push_new_line(out, indent);
                at += 1;
            }
            b':' => {
                out.extend_from_slice(b": ");
                at += 1;
            }
            _ => {
                let rest = &bytes[at..];
                let end = rest.iter().position(|b| matches!(b, b',' | b'}' | b']') || b.is_ascii_whitespace());
                let scalar = &rest[..end.unwrap_or(rest.len())];
                out.extend_from_slice(scalar);
                at += scalar.len();
            }
        }
    }
}

fn push_new_line(out: &mut Vec<u8>, indent: usize) {
    const LINE: &[u8; 66] = b"\\n                                                                ";
    match LINE.get(..2 + 2 * indent) {
        Some(line) => out.extend_from_slice(line),
        None => {
            out.extend_from_slice(&LINE[..2]);
            out.resize(out.len() + 2 * indent, b' ');
        }
    }
}

#[inline]
fn skip_space(bytes: &[u8], mut at: usize) -> usize {
    while matches!(bytes.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// The end of the run of bytes from `at` that stand for themselves in a JSON string.
fn plain_run(bytes: &[u8], start: usize) -> usize {
    const BLOCK: usize = 32;
    let special = |b: u8| b < 0x20 || b == b'"' || b == b'\\';
    let mut at = start;
    // Most strings are short.
    for _ in 0..2 {
        match first_special(bytes, at) {
            Some(WORD) => at += WORD,
            Some(offset) => return at + offset,
            None => break,
        }
    }
    // A fold without an early exit is what the compiler turns into vector instructions.
    while let Some(block) = bytes.get(at..at + BLOCK) {
        if block.iter().fold(false, |found, &b| found | special(b)) {
            break;
        }
        at += BLOCK;
    }
    loop {
        match first_special(bytes, at) {
            Some(WORD) => at += WORD,
            Some(offset) => return at + offset,
            None => break,
        }
    }
    while bytes.get(at).is_some_and(|&b| !special(b)) {
        at += 1;
    }
    at
}

/// How many bytes [`first_special`] looks at.
const WORD: usize = 8;

/// Where in the eight bytes from `at` the first is that does not stand for itself in a JSON string; 8 if none is, and
/// `None` if there are fewer. Looks at all of them at once.
fn first_special(bytes: &[u8], at: usize) -> Option<usize> {
    const ONES: u64 = u64::from_ne_bytes([1; WORD]);
    const HIGHS: u64 = ONES << 7;
    let word = u64::from_le_bytes(*bytes.get(at..)?.first_chunk()?);
    // The high bit of a byte that is zero. A borrow may set that of a byte after it, and only the first one counts.
    let zeros = |word: u64| word.wrapping_sub(ONES) & !word & HIGHS;
    let controls = word.wrapping_sub(ONES * 0x20) & !word & HIGHS;
    let found = controls | zeros(word ^ (ONES * u64::from(b'"'))) | zeros(word ^ (ONES * u64::from(b'\\')));
    Some(found.trailing_zeros() as usize / 8)
}

/// The end of the string that starts with the quote at `start`.
fn skip_string(bytes: &[u8], start: usize) -> Result<usize, JsonError> {
    let mut at = start + 1;
    loop {
        at = plain_run(bytes, at);
        match bytes.get(at) {
            Some(b'"') => return Ok(at + 1),
            Some(b'\\') => at = skip_escape(bytes, at)?,
            Some(_) => return syntax(at, "a control character must be escaped"),
            None => return syntax(start, "the string does not end"),
        }
    }
}

fn skip_escape(bytes: &[u8], at: usize) -> Result<usize, JsonError> {
    match bytes.get(at + 1) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 2),
        Some(b'u') => match hex4(bytes, at + 2)? {
            0xD800..=0xDBFF => {
                let paired = bytes.get(at + 6) == Some(&b'\\')
                    && bytes.get(at + 7) == Some(&b'u')
                    && (0xDC00..=0xDFFF).contains(&hex4(bytes, at + 8)?);
                if paired { Ok(at + 12) } else { Err(JsonError::Surrogate { at }) }
            }
            0xDC00..=0xDFFF => Err(JsonError::Surrogate { at }),
            _ => Ok(at + 6),
        },
        _ => syntax(at, "invalid escape"),
    }
}

fn hex4(bytes: &[u8], at: usize) -> Result<u32, JsonError> {
    let mut code = 0;
    for offset in 0..4 {
        let digit = bytes.get(at + offset).and_then(|&b| char::from(b).to_digit(16));
        let Some(digit) = digit else { return syntax(at, "a \\u escape takes four hexadecimal digits") };
        code = code * 16 + digit;
    }
    Ok(code)
}

/// The end of the number that starts at `start`.
fn skip_number(bytes: &[u8], start: usize) -> Result<usize, JsonError> {
    let digits = |mut at: usize| {
        while bytes.get(at).is_some_and(u8::is_ascii_digit) {
            at += 1;
        }
        at
    };
    let mut at = start + usize::from(bytes[start] == b'-');
    let whole = at;
    at = digits(at);
    if at == whole {
        return syntax(at, "expected a value");
    }
    if bytes[whole] == b'0' && at > whole + 1 {
        return syntax(whole, "a number has no leading zeros");
    }
    // 308 digits and no exponent always fit a double.
    let mut may_overflow = at - whole > 308;
    if bytes.get(at) == Some(&b'.') {
        let fraction = at + 1;
        at = digits(fraction);
        if at == fraction {
            return syntax(at, "expected a digit");
        }
    }
    if matches!(bytes.get(at), Some(b'e' | b'E')) {
        may_overflow = true;
        let exponent = at + 1 + usize::from(matches!(bytes.get(at + 1), Some(b'+' | b'-')));
        at = digits(exponent);
        if at == exponent {
            return syntax(at, "expected a digit");
        }
    }
    if may_overflow {
        let number = std::str::from_utf8(&bytes[start..at]).ok().and_then(|n| n.parse::<f64>().ok());
        if !number.is_some_and(f64::is_finite) {
            return Err(JsonError::NumberRange { at: start });
        }
    }
    Ok(at)
}

/// The end of the value that starts at `start`, inside `outer` levels of nesting. Not recursive: one bit a
/// level says whether it is an object.
fn skip_value(bytes: &[u8], start: usize, max_depth: usize, outer: usize) -> Result<usize, JsonError> {
    let mut at = start;
    let mut depth = 0;
    let mut objects: u128 = 0;
    'value: loop {
        at = skip_space(bytes, at);
        let literal = |word: &'static [u8]| bytes[at..].starts_with(word).then_some(at + word.len());
        at = match bytes.get(at) {
            Some(&open @ (b'{' | b'[')) => {
                if outer + depth >= max_depth {
                    return Err(JsonError::TooDeep { limit: max_depth, at });
                }
                depth += 1;
                objects = objects << 1 | u128::from(open == b'{');
                at = skip_space(bytes, at + 1);
                let close = if open == b'{' { b'}' } else { b']' };
                if bytes.get(at) != Some(&close) {
                    if open == b'{' {
                        at = skip_key(bytes, at)?;
                    }
                    continue 'value;
                }
                depth -= 1;
                objects >>= 1;
                at + 1
            }
            Some(b'"') => skip_string(bytes, at)?,
            Some(b't') => match literal(b"true") {
                Some(end) => end,
                None => return syntax(at, "expected a value"),
            },
            Some(b'f') => match literal(b"false") {
                Some(end) => end,
                None => return syntax(at, "expected a value"),
            },
            Some(b'n') => match literal(b"null") {
                Some(end) => end,
                None => return syntax(at, "expected a value"),
            },
            Some(b'-' | b'0'..=b'9') => skip_number(bytes, at)?,
            Some(_) => return syntax(at, "expected a value"),
            None => return syntax(at, "the text ends where a value should stand"),
        };
        // A value has ended: close what it closes, and find where the next one starts.
        loop {
            if depth == 0 {
                return Ok(at);
            }
            at = skip_space(bytes, at);
            let in_object = objects & 1 == 1;
            match bytes.get(at) {
                Some(b',') => {
                    at = skip_space(bytes, at + 1);
                    if in_object {
                        at = skip_key(bytes, at)?;
                    }
                    continue 'value;
                }
                Some(b'}') if in_object => at += 1,
                Some(b']') if !in_object => at += 1,
                _ => return syntax(at, if in_object { "expected ',' or '}'" } else { "expected ',' or ']'" }),
            }
            depth -= 1;
            objects >>= 1;
        }
    }
}

/// Past a member's name and the colon.
fn skip_key(bytes: &[u8], at: usize) -> Result<usize, JsonError> {
    if bytes.get(at) != Some(&b'"') {
        return syntax(at, "expected a member name");
    }
    let at = skip_space(bytes, skip_string(bytes, at)?);
    if bytes.get(at) != Some(&b':') {
        return syntax(at, "expected ':'");
    }
    Ok(at + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::Value;

    #[test]
    fn a_run_of_plain_bytes_ends_at_the_first_that_is_none() {
        let is_special = |b: &u8| *b < 0x20 || *b == b'"' || *b == b'\\';
        for byte in 0..=255_u8 {
            for (length, at) in (1..100).flat_map(|length| (0..length).map(move |at| (length, at))) {
                let mut bytes = vec![b'a'; length];
                // What stands before and after it must not matter.
                (bytes[at / 2], bytes[length - 1], bytes[at]) = (0xff, b'"', byte);
                let first = bytes.iter().position(is_special).unwrap_or(length);
                assert_eq!(plain_run(&bytes, 0), first, "{byte} at {at} of {length}");
            }
        }
    }

    #[test]
    fn reader_slices_members_and_keeps_their_text() {
        let mut reader = Reader::new(r#" { "a" : [1, {"b":2E2}] , "c":{"d" : "x\u0041"},"e":null } "#, 8);
        reader.begin_object().unwrap();
        assert_eq!(reader.next_key().unwrap().as_deref(), Some("a"));
        assert_eq!(reader.value().unwrap(), r#"[1, {"b":2E2}]"#);
        assert_eq!(reader.next_key().unwrap().as_deref(), Some("c"));
        let mark = reader.mark();
        reader.begin_object().unwrap();
        assert_eq!(reader.next_key().unwrap().as_deref(), Some("d"));
        assert_eq!(decode_string(reader.value().unwrap()), "xA");
        assert_eq!(reader.next_key().unwrap(), None);
        assert_eq!(reader.since(mark), r#"{"d" : "x\u0041"}"#);
        assert_eq!(reader.next_key().unwrap().as_deref(), Some("e"));
        assert_eq!(reader.value().unwrap(), "null");
        assert_eq!(reader.next_key().unwrap(), None);
        reader.end().unwrap();
    }

    #[test]
    fn depth_is_counted_through_entered_objects() {
        let nested = |n: usize| format!("{}{}", "[".repeat(n), "]".repeat(n));
        assert!(check(&nested(64), 64).is_ok());
        assert_eq!(check(&nested(65), 64), Err(JsonError::TooDeep { limit: 64, at: 64 }));
        assert!(check(&nested(128), 1000).is_ok());
        assert!(check(&nested(129), 1000).is_err());
        let text = format!(r#"{{"a":{}}}"#, nested(64));
        let mut reader = Reader::new(&text, 64);
        reader.begin_object().unwrap();
        reader.next_key().unwrap();
        assert!(matches!(reader.value(), Err(JsonError::TooDeep { .. })));
    }

    #[test]
    fn too_many_elements_are_neither_kept_nor_read() {
        assert_eq!(few_elements(" [ 1 , {} ] ", 8, 2), Ok(Some(vec!["1", "{}"])));
        assert_eq!(few_elements("[]", 8, 0), Ok(Some(Vec::new())));
        assert_eq!(few_elements("[1,2,3 and what is no JSON", 8, 2), Ok(None));
        assert!(few_elements("[1,2", 8, 2).is_err() && few_elements("{}", 8, 2).is_err());
    }

    #[test]
    fn what_breaks_the_other_end_is_refused() {
        assert!(check("[1e308, -1e308, 1e-400, 123456789012345678901234567890]", 8).is_ok());
        assert_eq!(check("1e400", 8), Err(JsonError::NumberRange { at: 0 }));
        assert!(check(&"9".repeat(308), 8).is_ok());
        assert!(check(&"9".repeat(310), 8).is_err());
        assert!(check(r#""\ud83d\ude00 \u0000 \u2028""#, 8).is_ok());
        for lone in [r#""\ud83d""#, r#""\ude00""#, r#""\ud83dx""#, r#""\ud83d\u0041""#, r#""\ud83d\n""#] {
            assert_eq!(check(lone, 8), Err(JsonError::Surrogate { at: 1 }), "{lone}");
        }
        for bad in [
            "",
            " ",
            "{",
            "[1,]",
            "{\"a\":1,}",
            "{\"a\" 1}",
            "{a:1}",
            "01",
            "1.",
            ".5",
            "+1",
            "1e",
            "-",
            "nul",
            "\"\n\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"",
            "1 2",
            "[1}",
            "{\"a\":1]",
            "\u{feff}1",
            "NaN",
            "[1 2]",
            "}",
        ] {
            assert!(check(bad, 8).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn canonical_numbers_join_equals_only() {
        let same = |a, b| assert_eq!(canonical_number(a), canonical_number(b), "{a} {b}");
        same("100", "1e2");
        same("1.0e2", "100.0");
        same("-0", "0e9");
        same("0.001", "1E-3");
        same("10", "1e+0000000000000000000001");
        same("0.1", "1e-0000000000000000000001");
        assert_ne!(canonical_number("9007199254740993"), canonical_number("9007199254740992"));
        assert_ne!(canonical_number("1"), canonical_number("-1"));
        assert_eq!(canonical_number("1e1111111111111111111"), None);
        assert!(
            is_whole_number("1.0") && is_whole_number("1e2") && is_whole_number("-0.0") && is_whole_number("15e-0")
        );
        assert!(!is_whole_number("1.5") && !is_whole_number("1e-1"));
    }

    #[test]
    fn pretty_text_is_laid_out_as_json_stringify_does() {
        let mut out = Vec::new();
        push_pretty_escaped(&mut out, r#"{"a":[ ],"b":{ },"c":[1, {"d":"x\"y, {z}"}],"e":1E2}"#);
        let text: String = serde_json::from_str(&format!("\"{}\"", String::from_utf8(out).unwrap())).unwrap();
        let expected = "{\n  \"a\": [],\n  \"b\": {},\n  \"c\": [\n    1,\n    {\n      \"d\": \"x\\\"y, {z}\"\n    }\n  ],\n  \"e\": 1E2\n}";
        assert_eq!(text, expected);
    }

    /// Documents of every shape.
    fn any_json() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::Null),
            any::<bool>().prop_map(Value::from),
            any::<i64>().prop_map(Value::from),
            any::<f64>().prop_map(Value::from),
            any::<String>().prop_map(Value::from),
        ];
        leaf.prop_recursive(6, 64, 8, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..8).prop_map(Value::from),
                prop::collection::vec((any::<String>(), inner), 0..8)
                    .prop_map(|m| Value::Object(m.into_iter().collect())),
            ]
        })
    }

    proptest! {
        #[test]
        fn accepts_all_that_serde_json_writes(value in any_json()) {
            prop_assert_eq!(check(&value.to_string(), 64), Ok(()));
            prop_assert_eq!(check(&serde_json::to_string_pretty(&value).unwrap(), 64), Ok(()));
        }

        #[test]
        fn agrees_with_serde_json_on_damaged_documents(value in any_json(), cut in any::<prop::sample::Index>(), with in "[\\[\\]{},:\"0-9eE.+\\\\u-]{0,2}") {
            let mut text = value.to_string();
            let at = (0..=cut.index(text.len() + 1)).rev().find(|&i| text.is_char_boundary(i)).unwrap_or(0);
            let end = (at + 1..=text.len()).find(|&i| text.is_char_boundary(i)).unwrap_or(text.len());
            text.replace_range(at..end, &with);
            prop_assert_eq!(check(&text, 64).is_ok(), serde_json::from_str::<Value>(&text).is_ok(), "{}", text);
        }

        #[test]
        fn escaping_round_trips(text in any::<String>()) {
            let mut out = Vec::new();
            push_string(&mut out, &text);
            prop_assert_eq!(serde_json::from_slice::<String>(&out).unwrap(), text);
        }

        #[test]
        fn long_texts_are_escaped_as_serde_json_does(text in "([a-zé]{0,20}[\"\\\\\n]{0,3}){0,60}") {
            let mut out = Vec::new();
            push_string(&mut out, &text);
            prop_assert_eq!(String::from_utf8(out).unwrap(), serde_json::to_string(&text).unwrap());
        }

        #[test]
        fn pretty_text_is_the_same_document(value in any_json()) {
            let mut out = vec![b'"'];
            push_pretty_escaped(&mut out, &value.to_string());
            out.push(b'"');
            let text: String = serde_json::from_slice(&out).unwrap();
            prop_assert_eq!(&text, &serde_json::to_string_pretty(&value).unwrap());
        }
    }
}
