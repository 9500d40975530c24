//! Where a call comes from, as its client says it in the words of the W3C: `traceparent`, `tracestate`, `baggage`.
//!
//! MCP has them in the request's `_meta`; what stands there reaches the app as it is. Where it stands in HTTP headers
//! alone, as instrumented HTTP clients and gateways write it, it is added to `meta` of the bridge's frame. What is
//! malformed or too long in a header is not carried, and never an error.

use std::borrow::Cow;
use std::fmt;

use http::{HeaderMap, HeaderName};

use crate::json;
use crate::protocol::TraceMembers;

/// Names the span that a call comes from.
pub const TRACEPARENT: &str = "traceparent";
/// What tracing systems remember of the trace.
pub const TRACESTATE: &str = "tracestate";
/// What the client's own program remembers.
pub const BAGGAGE: &str = "baggage";

const PARENT_HEADER: HeaderName = HeaderName::from_static(TRACEPARENT);
const STATE_HEADER: HeaderName = HeaderName::from_static(TRACESTATE);
const BAGGAGE_HEADER: HeaderName = HeaderName::from_static(BAGGAGE);

/// The longest `traceparent` of a header: the version of today takes 55 bytes, later ones may take more.
pub const MAX_TRACEPARENT_BYTES: usize = 128;
/// The longest `tracestate` that is carried from headers and exported: what the W3C demands at the least.
pub const MAX_TRACESTATE_BYTES: usize = 512;
/// The longest `baggage` that is carried from headers: what the W3C demands at the least.
pub const MAX_BAGGAGE_BYTES: usize = 8192;

/// A span, and whether whoever made it keeps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceParent {
    /// The trace, not 0.
    pub trace_id: u128,
    /// The span, not 0.
    pub span_id: u64,
    /// Whether it is kept.
    pub is_sampled: bool,
}

impl TraceParent {
    /// Reads the text of a `traceparent` of any version (Trace Context, section 3.2.2).
    pub fn parse(text: &str) -> Option<Self> {
        let hex = |range: std::ops::Range<usize>| {
            let digits = text.get(range)?;
            let is_hex = digits.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
            is_hex.then(|| u128::from_str_radix(digits, 16).ok()).flatten()
        };
        let are_dashes = [2, 35, 52].iter().all(|at| text.as_bytes().get(*at) == Some(&b'-'));
        let (version, trace_id, span_id, flags) = (hex(0..2)?, hex(3..35)?, hex(36..52)?, hex(53..55)?);
        let is_whole = match version {
            0 => text.len() == 55,
            0xff => false,
            _ => matches!(text.as_bytes().get(55), None | Some(b'-')) && text.len() <= MAX_TRACEPARENT_BYTES,
        };
        let span_id = u64::try_from(span_id).ok()?;
        let is_valid = are_dashes && is_whole && trace_id != 0 && span_id != 0;
        is_valid.then_some(TraceParent { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }
}

impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "00-{:032x}-{:016x}-{:02x}", self.trace_id, self.span_id, u8::from(self.is_sampled))
    }
}

/// Where a call comes from.
#[derive(Debug, Default)]
pub struct Origin<'a> {
    /// The client's span, if it names one.
    pub parent: Option<TraceParent>,
    /// The `tracestate` that belongs to it.
    pub state: Option<Cow<'a, str>>,
    /// The span that a header names beside it: that of the HTTP request, which may have carried several calls.
    pub beside: Option<TraceParent>,
    /// The text of `traceparent`, if it stands in a header alone.
    header: Option<&'a str>,
    /// The same of `baggage`.
    baggage: Option<Cow<'a, str>>,
}

impl<'a> Origin<'a> {
    /// What a request says, in `_meta` or else in its headers. Its span is only looked for in `_meta` if somebody wants
    /// to know it: `is_traced`.
    pub fn of(meta: Option<&'a str>, headers: &'a HeaderMap, is_traced: bool) -> Self {
        let in_header = headers.contains_key(PARENT_HEADER) || headers.contains_key(BAGGAGE_HEADER);
        if !in_header && !is_traced {
            return Origin::default();
        }
        let in_meta = |name| meta.and_then(|meta| json::member(meta, name));
        let mut origin = Origin::default();
        if in_meta(BAGGAGE).is_none() {
            origin.baggage = list(headers, &BAGGAGE_HEADER, MAX_BAGGAGE_BYTES);
        }
        let mut lines = headers.get_all(PARENT_HEADER).iter();
        let only = lines.next().filter(|_| lines.next().is_none());
        let text = only.and_then(|line| line.to_str().ok());
        let of_request = text.and_then(TraceParent::parse);
        match (in_meta(TRACEPARENT), in_meta(TRACESTATE)) {
            (None, None) => {
                origin.parent = of_request;
                if of_request.is_some() {
                    origin.header = text;
                    origin.state = list(headers, &STATE_HEADER, MAX_TRACESTATE_BYTES);
                }
            }
            (parent, state) => {
                origin.parent = parent.and_then(json::as_string).and_then(|text| TraceParent::parse(&text));
                origin.beside = of_request.filter(|span| origin.parent != Some(*span));
                if origin.parent.is_some() {
                    let state = state.and_then(json::as_string);
                    origin.state = state.filter(|state| state.len() <= MAX_TRACESTATE_BYTES);
                }
            }
        }
        origin
    }

    /// What the app gets of it beside or instead of what stands in `_meta`. `span` is the text of our own span's
    /// `traceparent`, if the app's spans are to be its children.
    pub fn members<'b>(&'b self, span: Option<&'b str>) -> TraceMembers<'b> {
        TraceMembers {
            traceparent: span.or(self.header),
            tracestate: self.header.and(self.state.as_deref()),
            baggage: self.baggage.as_deref(),
            instead_of: match (span, self.parent) {
                (None, _) => &[],
                (Some(_), Some(_)) => &[TRACEPARENT],
                // The state belongs to a span that nobody could name.
                (Some(_), None) => &[TRACEPARENT, TRACESTATE],
            },
        }
    }
}

/// What the lines of a header say, as one list; nothing, if that is too long.
fn list<'a>(headers: &'a HeaderMap, name: &HeaderName, most: usize) -> Option<Cow<'a, str>> {
    let mut list: Option<Cow<'a, str>> = None;
    for line in headers.get_all(name) {
        let line = line.to_str().ok()?;
        list = Some(match list {
            None => line.into(),
            Some(before) => format!("{before},{line}").into(),
        });
        if list.as_ref().is_some_and(|list| list.len() > most) {
            return None;
        }
    }
    list.filter(|list| !list.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    const PARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

    fn headers(lines: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    #[test]
    fn a_traceparent_is_read_as_the_w3c_says() {
        let parent = TraceParent::parse(PARENT).unwrap();
        assert_eq!(parent.to_string(), PARENT);
        assert!(parent.is_sampled && !TraceParent::parse(&format!("{}00", &PARENT[..53])).unwrap().is_sampled);
        assert!(TraceParent::parse(&PARENT.replace("-01", "-03")).unwrap().is_sampled);
        let later = |rest: &str| TraceParent::parse(&format!("cc{}{rest}", &PARENT[2..]));
        assert!(later("").is_some() && later("-what-the-future-will-be-like").is_some());
        assert!(later(".what").is_none() && later(&format!("-{}", "x".repeat(MAX_TRACEPARENT_BYTES))).is_none());
        for wrong in [
            "",
            "00",
            "ff-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-00000000000000000000000000000000-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-0000000000000000-01",
            "00-0AF7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01-",
            "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0x",
            "00 0af7651916cd43dd8448eb211c80319c b7ad6b7169203331 01",
            "00-+af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "00-0af7651916cd43dd8448eb211c80319\u{e9}-b7ad6b7169203331-01",
        ] {
            assert_eq!(TraceParent::parse(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn lists_of_headers_are_joined_and_bounded() {
        let of = |lines: &[(&'static str, &str)]| {
            let headers = headers(lines);
            let origin = Origin::of(None, &headers, false);
            let members = origin.members(None);
            [members.traceparent, members.tracestate, members.baggage].map(|text| text.map(str::to_owned))
        };
        let some = |text: &str| Some(text.to_owned());
        let lines =
            [(TRACEPARENT, PARENT), (TRACESTATE, "a=1"), (TRACESTATE, "b=2"), (BAGGAGE, "c=3"), (BAGGAGE, "d=4")];
        assert_eq!(of(&lines), [some(PARENT), some("a=1,b=2"), some("c=3,d=4")]);
        assert_eq!(of(&[(TRACESTATE, "a=1"), (BAGGAGE, "c=3")]), [None, None, some("c=3")]);
        assert_eq!(of(&[(TRACEPARENT, "x"), (TRACESTATE, "a=1")]), [None, None, None]);
        assert_eq!(of(&[(TRACEPARENT, PARENT), (TRACEPARENT, PARENT)]), [None, None, None]);
        for (name, most) in [(TRACESTATE, MAX_TRACESTATE_BYTES), (BAGGAGE, MAX_BAGGAGE_BYTES)] {
            let carried = |bytes: usize| {
                let value = "x".repeat(bytes);
                of(&[(TRACEPARENT, PARENT), (name, &value)])[1..].iter().flatten().map(String::len).sum::<usize>()
            };
            assert_eq!((carried(most), carried(most + 1)), (most, 0), "{name}");
        }
    }
}
