//! Two lines, each a JSON-RPC id: a cancellation with the one hits a call with the other if, and only if, they are
//! the same string, or the same number as exact decimals.

use std::time::Instant;

use openclaw_mcp_proxy::json;
use openclaw_mcp_proxy::node::local_mcp::calls::{Calls, Cancelled};
use serde_json::Value;
use tokio_util::sync::CancellationToken;

/// Checks two ids.
pub fn check(data: &[u8]) {
    let Ok(text) = std::str::from_utf8(data) else { return };
    let (a, b) = text.split_once('\n').unwrap_or((text, text));
    let (a, b) = (a.trim_ascii(), b.trim_ascii());
    let is_json = |text: &str| serde_json::from_str::<&serde_json::value::RawValue>(text).is_ok();
    if a.is_empty() || b.is_empty() || !is_json(a) || !is_json(b) {
        return;
    }
    assert!(hits(a, a) && hits(b, b), "an id is itself: {a} {b}");
    assert_eq!(hits(a, b), hits(b, a), "{a} {b}");
    match (kind(a), kind(b)) {
        ('0', '0') => {
            if let Some(same) = same_number(a, b) {
                assert_eq!(hits(a, b), same, "{a} {b}");
            }
            if let Some(other) = respelled(a) {
                assert!(hits(a, &other), "{a} {other}");
            }
        }
        ('"', '"') => {
            if let (Ok(x), Ok(y)) = (serde_json::from_str::<Value>(a), serde_json::from_str::<Value>(b)) {
                assert_eq!(hits(a, b), x == y, "{a} {b}");
            }
        }
        (x, y) if x != y => assert!(!hits(a, b), "{a} {b}"),
        _ => {}
    }
}

fn kind(id: &str) -> char {
    match id.as_bytes()[0] {
        b'-' | b'0'..=b'9' => '0',
        other => char::from(other),
    }
}

/// Whether a cancellation of `cancelled` hits a call with the id `id`.
fn hits(id: &str, cancelled: &str) -> bool {
    let (calls, transport, now) = (Calls::default(), CancellationToken::new(), Instant::now());
    let call = calls.register(id, &transport, now);
    let after = calls.cancel(cancelled, now) == Cancelled::Call;
    assert_eq!(call.invocation.token().is_cancelled(), after);
    // One that comes first hits the same.
    let (early, transport) = (Calls::default(), CancellationToken::new());
    assert_eq!(early.cancel(cancelled, now), Cancelled::Waits);
    assert_eq!(early.register(id, &transport, now).invocation.token().is_cancelled(), after, "{id} {cancelled}");
    after
}

/// Whether two numbers are the same one, digit by digit; `None` if they are too long to be written out.
pub(super) fn same_number(a: &str, b: &str) -> Option<bool> {
    Some(plain(a)? == plain(b)?)
}

/// A number without an exponent, its sign, and no zero at either end.
fn plain(number: &str) -> Option<(bool, String)> {
    const MOST: usize = 1000;
    let (is_negative, rest) = number.strip_prefix('-').map_or((false, number), |rest| (true, rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    if whole.len() + fraction.len() > MOST {
        return None;
    }
    let mut digits: Vec<char> = format!("{whole}{fraction}").chars().collect();
    if digits.iter().all(|digit| *digit == '0') {
        return Some((false, "0".to_owned()));
    }
    let exponent: i64 = exponent.parse().ok().filter(|exponent: &i64| exponent.unsigned_abs() <= MOST as u64)?;
    // The digits stand around a point, with zeros enough on both sides.
    let zeros = std::iter::repeat_n('0', 2 * MOST);
    let mut all: Vec<char> = zeros.clone().collect();
    let point = i64::try_from(all.len() + whole.len()).ok()? + exponent;
    all.append(&mut digits);
    all.extend(zeros);
    all.insert(usize::try_from(point).ok()?, '.');
    let text: String = all.into_iter().collect();
    Some((is_negative, text.trim_matches('0').to_owned()))
}

/// The same number, written in another way: its point moved, and zeros put at its ends.
fn respelled(number: &str) -> Option<String> {
    let (sign, rest) = number.strip_prefix('-').map_or(("", number), |rest| ("-", rest));
    let (mantissa, exponent) = rest.split_once(['e', 'E']).unwrap_or((rest, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    // An exponent of more digits is known by its text alone.
    let exponent: i64 = exponent.parse().ok().filter(|exponent: &i64| exponent.unsigned_abs() < 10_u64.pow(17))?;
    let (first, rest) = whole.split_at(1);
    let exponent = exponent + i64::try_from(rest.len()).ok()?;
    let respelled =
        format!("{sign}{first}.{rest}{fraction}00E{}00{}", if exponent < 0 { '-' } else { '+' }, exponent.abs());
    assert_eq!(json::check(&respelled, 1).is_ok(), json::check(number, 1).is_ok(), "{respelled}");
    Some(respelled)
}
