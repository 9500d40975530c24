//! Answers that are not the expected one, in words: who gave it (the proxy, or somebody in front of it), and why.

use http::StatusCode;
use http::header::{LOCATION, WWW_AUTHENTICATE};
use serde_json::Value;

use super::finding::{Check, Finding};
use super::fixes;
use super::wire::{Answer, Base, WireError};

/// The proxy's own sentence, if the answer is one of its errors.
pub(super) fn sentence(answer: &Answer) -> Option<String> {
    let body: Value = serde_json::from_slice(&answer.body).ok()?;
    let sentence = body.get("detail").or_else(|| body.get("error")?.get("message"))?;
    sentence.as_str().map(str::to_owned)
}

/// What an answer that should have been another one means for `check`, or for a check that it fails as well.
pub(super) fn unexpected(base: &Base, check: Check, what: &str, answer: &Answer) -> Finding {
    let status = answer.status;
    if status.is_redirection() {
        let to = quote(answer.header(LOCATION).unwrap_or("somewhere"));
        let message = format!(
            "{what} is answered with a redirect ({status}) to {to}. Apps and MCP clients follow none, or send the token where it does not belong."
        );
        return Finding::problem(Check::Path, message, fixes::redirect(base));
    }
    if let Some(sentence) = sentence(answer) {
        return by_the_proxy(base, check, what, status, &sentence);
    }
    match status.as_u16() {
        502..=504 => {
            let message = format!("{what}: the front is there, but the proxy behind it does not answer ({status}).");
            Finding::problem(Check::Health, message, fixes::upstream())
        }
        401 | 407 if answer.headers.contains_key(WWW_AUTHENTICATE) => {
            let message = format!(
                "{what}: the front asks for a password of its own ({status}), so the token cannot get through."
            );
            Finding::problem(Check::Authorization, message, fixes::authorization())
        }
        404 => {
            let message =
                format!("{what}: somebody else than the proxy says that there is nothing at this path ({status}).");
            Finding::problem(Check::Path, message, fixes::path(base))
        }
        405 | 501 => {
            let message = format!("{what}: the front does not let this method through ({status}).");
            Finding::problem(Check::Methods, message, fixes::methods("it"))
        }
        413 => {
            let message = format!("{what}: the front refuses so large a body ({status}).");
            Finding::problem(Check::BodySize, message, fixes::body_size(answer.body.len()))
        }
        _ => {
            let body = quote(&answer.text());
            let message = format!("{what}: the answer is {status}, and not the proxy's: {body}");
            Finding::problem(check, message, Vec::new())
        }
    }
}

fn by_the_proxy(base: &Base, check: Check, what: &str, status: StatusCode, sentence: &str) -> Finding {
    let says = format!("{what}: the proxy says {status}: {}", quote(sentence));
    if let Some(header) = sentence.strip_prefix("The header ").and_then(|rest| rest.strip_suffix(" is given twice.")) {
        let message = format!("The header {header} arrives at the proxy twice: the front adds one to the client's.");
        return Finding::problem(Check::DoubledHeaders, message, fixes::doubled(header));
    }
    if sentence.starts_with("This Host is not served here") || sentence.contains("valid Host header") {
        let message = format!(
            "The proxy refuses the Host that it gets: the front passes another one than {}, or the proxy does not know that name.",
            base.authority()
        );
        return Finding::problem(Check::Host, message, fixes::host(base));
    }
    match status.as_u16() {
        404 if sentence == "There is nothing at this path." => {
            let message =
                format!("{what}: the request reaches the proxy with another path, so it finds nothing there.");
            Finding::problem(Check::Path, message, fixes::path(base))
        }
        429 | 503 => Finding::problem(check, format!("{says} Try again in a moment."), Vec::new()),
        _ => Finding::problem(check, says, Vec::new()),
    }
}

/// What it means that there is no answer.
pub(super) fn silence(check: Check, what: &str, error: &WireError) -> Finding {
    Finding::problem(check, format!("{what}: {error}."), Vec::new())
}

/// What a server says, on one line and not too long.
pub(super) fn quote(text: &str) -> String {
    const MOST: usize = 160;
    let clean: String = text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
    let clean = clean.split_whitespace().collect::<Vec<_>>().join(" ");
    match clean.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &clean[..end]),
        None => clean,
    }
}
