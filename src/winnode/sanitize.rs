//! What a server says, made safe to print: it may hold control sequences for the terminal, or a token.

/// The most characters that are printed.
const MAX_CHARS: usize = 4096;
/// A run of token characters of this length is taken for a secret.
const SECRET_LEN: usize = 32;
/// What stands in a secret's place.
const REDACTED: &str = "<redacted>";

/// Drops control characters, hides what looks like a token, and keeps the beginning: the first line, or if `whole`
/// some pages.
pub fn sanitize(text: &str, whole: bool) -> String {
    let is_printable = |c: &char| !c.is_control() || matches!(c, '\t' | '\n' | '\r');
    let printable: String = text.chars().filter(is_printable).collect();
    let redacted = redact(&printable);
    let kept = if whole { &redacted } else { redacted.lines().next().unwrap_or_default() };
    match kept.char_indices().nth(MAX_CHARS) {
        Some((end, _)) => format!("{}… (truncated)", &kept[..end]),
        None => kept.to_owned(),
    }
}

fn redact(text: &str) -> String {
    let is_token_char = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while !rest.is_empty() {
        let run = rest.find(|c| !is_token_char(c)).unwrap_or(rest.len());
        out.push_str(if run >= SECRET_LEN { REDACTED } else { &rest[..run] });
        let other = rest[run..].find(is_token_char).map_or(rest.len(), |at| run + at);
        out.push_str(&rest[run..other]);
        rest = &rest[other..];
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn control_characters_are_dropped_and_tokens_hidden() {
        assert_eq!(sanitize("a\u{1b}[31mb\u{7}\u{7f}\u{9b}c\td", false), "a[31mbc\td");
        let (short, long) = ("x".repeat(31), "a-_9".repeat(8));
        assert_eq!(sanitize(&format!("{short} {long}. {long}x!"), false), format!("{short} <redacted>. <redacted>!"));
        assert_eq!(sanitize("0b9f3c1e-0000-4000-8000-123456789abc", false), "<redacted>");
        // A control character inside a token does not save it.
        assert_eq!(sanitize(&format!("{}\u{0}{}", "x".repeat(16), "y".repeat(16)), false), "<redacted>");
    }

    #[test]
    fn only_the_beginning_is_kept() {
        assert_eq!(sanitize("one\r\ntwo", false), "one");
        assert_eq!(sanitize("one\ntwo", true), "one\ntwo");
        assert_eq!(sanitize("", false), "");
        let long = "é ".repeat(MAX_CHARS);
        let kept = sanitize(&long, true);
        assert_eq!(kept.chars().count(), MAX_CHARS + "… (truncated)".chars().count());
        let exact = "é ".repeat(MAX_CHARS / 2);
        assert_eq!(sanitize(&exact, true), exact);
    }
}
