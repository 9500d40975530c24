//! What a server sent back, judged: the answer, something on the way to it, or an error to be made readable.

use http::{HeaderValue, StatusCode, Uri};

use super::lines::one_line;
use super::message::Ids;
use crate::cancel::same_id;
use crate::json::{self, JsonError, MAX_DEPTH, Reader};
use crate::mcp::HEADER_MISMATCH;

/// A text of a server that is shown to the user is cut after this many characters.
const SHOWN_CHARS: usize = 300;

/// Why a request is answered by an error of ours.
#[derive(Debug, PartialEq, Eq)]
pub struct Failure {
    /// The JSON-RPC error's code: an HTTP status, as the proxy's own codes are, or what the server said.
    pub code: i64,
    /// A sentence for the client's user.
    pub message: String,
    /// The JSON-RPC error's data, as JSON text.
    pub data: Option<String>,
}

impl Failure {
    /// A failure without data.
    pub fn new(status: StatusCode, message: String) -> Self {
        Failure { code: status.as_u16().into(), message, data: None }
    }
}

/// What a message of a server is to a request.
#[derive(Debug, PartialEq, Eq)]
pub enum Kind {
    /// Its answer.
    Answer,
    /// A notification, or a request to the client.
    Notice,
    /// An error that names no request.
    Nameless(Failure),
    /// An answer to something else.
    Stray,
}

/// The members of a message of a server, each as its text.
#[derive(Debug, Default)]
struct Received<'a> {
    id: Option<&'a str>,
    method: Option<&'a str>,
    result: Option<&'a str>,
    error: Option<&'a str>,
}

impl<'a> Received<'a> {
    fn parse(text: &'a str) -> Result<Self, JsonError> {
        let mut received = Received::default();
        let mut reader = Reader::new(text, MAX_DEPTH);
        reader.begin_object()?;
        while let Some(key) = reader.next_key()? {
            let value = reader.value()?;
            match &*key {
                "id" => received.id = Some(value).filter(|id| *id != "null"),
                "method" => received.method = Some(value),
                "result" => received.result = Some(value),
                "error" => received.error = Some(value).filter(|error| json::is_object(error)),
                _ => {}
            }
        }
        reader.end()?;
        Ok(received)
    }

    fn failure(&self) -> Option<Failure> {
        let error = self.error?;
        Some(Failure {
            code: json::member(error, "code")?.parse().ok()?,
            message: json::member(error, "message").and_then(json::as_string)?.into_owned(),
            data: json::member(error, "data").map(str::to_owned),
        })
    }
}

/// What `body`, a message of a server, is to a request with `ids`.
///
/// # Errors
/// What is wrong with it.
pub fn classify(ids: &Ids, body: &[u8]) -> Result<Kind, String> {
    let text = std::str::from_utf8(body).map_err(|_| "it is not valid UTF-8".to_owned())?;
    let id = match ids {
        Ids::One(id) => id,
        _ if text.trim_start().starts_with('[') => {
            return json::check(text, MAX_DEPTH).map(|()| Kind::Answer).map_err(|error| error.to_string());
        }
        _ => "null",
    };
    let received = Received::parse(text).map_err(|error| error.to_string())?;
    if received.method.is_some() {
        return Ok(Kind::Notice);
    }
    if received.result.is_none() && received.error.is_none() {
        return Err("it is no JSON-RPC message".into());
    }
    match received.id {
        Some(other) if same_id(id, other) => Ok(Kind::Answer),
        None => Ok(received.failure().map_or(Kind::Stray, Kind::Nameless)),
        Some(_) => Ok(Kind::Stray),
    }
}

/// The line that passes on an error which came with an HTTP status of its own, or the failure that it amounts to.
/// `location` is where a redirect leads.
pub fn refusal(ids: &Ids, status: StatusCode, location: Option<&HeaderValue>, body: &[u8]) -> Result<Vec<u8>, Failure> {
    match classify(ids, body) {
        Ok(Kind::Answer) => return Ok(one_line(body)),
        Ok(Kind::Nameless(Failure { message, data, .. })) => {
            return Err(Failure { data, ..Failure::new(status, message) });
        }
        _ => {}
    }
    let text = std::str::from_utf8(body).unwrap_or_default();
    let detail = json::member(text, "detail").and_then(json::as_string);
    // No more of it than the host: its path may hold a session id, and this is logged.
    let location = location.and_then(|location| location.to_str().ok()?.parse::<Uri>().ok());
    let location = location.map(|uri| match (uri.scheme_str(), uri.authority()) {
        (Some(scheme), Some(authority)) => format!("{scheme}://{authority}"),
        _ => "another path".to_owned(),
    });
    let more = match (detail, location) {
        (Some(detail), _) => format!(": {}", shown(&detail)),
        (None, Some(location)) if status.is_redirection() => {
            format!(" to {}, which is not followed: configure the right URL.", shown(&location))
        }
        _ => ".".to_owned(),
    };
    Err(Failure::new(status, format!("The server answered HTTP {status}{more}")))
}

fn shown(text: &str) -> String {
    text.chars().filter(|c| !c.is_control()).take(SHOWN_CHARS).collect()
}

/// Whether an answer says that the headers do not match the body.
pub fn is_header_mismatch(line: &[u8]) -> bool {
    let text = std::str::from_utf8(line).unwrap_or_default();
    Received::parse(text).ok().and_then(|received| received.failure()).is_some_and(|f| f.code == HEADER_MISMATCH)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn one(id: &str) -> Ids {
        Ids::One(id.to_owned())
    }

    #[test]
    fn only_the_requests_own_answer_is_one() {
        let kind = |body: &str| classify(&one("1"), body.as_bytes());
        assert_eq!(kind(r#"{"jsonrpc":"2.0","id":1.0,"result":{}}"#), Ok(Kind::Answer));
        assert_eq!(kind("{\"id\":1,\n\"error\":{}}"), Ok(Kind::Answer));
        assert_eq!(kind(r#"{"id":"1","result":{}}"#), Ok(Kind::Stray));
        assert_eq!(kind(r#"{"id":null,"result":{}}"#), Ok(Kind::Stray));
        assert_eq!(kind(r#"{"method":"notifications/progress"}"#), Ok(Kind::Notice));
        assert_eq!(kind(r#"{"id":1,"method":"roots/list"}"#), Ok(Kind::Notice));
        let nameless = Failure { code: -32700, message: "No.".into(), data: Some("7".into()) };
        assert_eq!(kind(r#"{"error":{"code":-32700,"message":"No.","data":7}}"#), Ok(Kind::Nameless(nameless)));
        for bad in ["", "[]", "{}", "<html>", r#"{"id":1,"result":1e400}"#] {
            assert!(kind(bad).is_err(), "{bad}");
        }
        assert!(classify(&one("1"), b"{\"id\":1,\"result\":\"\xff\"}").is_err());
        assert_eq!(classify(&Ids::Batch(vec!["1".into()]), b"[{}]"), Ok(Kind::Answer));
    }

    #[test]
    fn an_error_status_becomes_an_error_with_the_requests_id() {
        let refused = |status: u16, location: Option<&'static str>, body: &str| {
            let status = StatusCode::from_u16(status).unwrap();
            refusal(&one("7"), status, location.map(HeaderValue::from_static).as_ref(), body.as_bytes())
        };
        let own = r#"{"jsonrpc":"2.0","id":7,"error":{"code":-32601,"message":"m"}}"#;
        assert_eq!(refused(404, None, &own.replace(',', ",\n")), Ok(own.replace(',', ", ").into_bytes()));
        let says = |result: Result<Vec<u8>, Failure>| {
            let Failure { code, message, .. } = result.unwrap_err();
            (code, message)
        };
        let nameless = r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"No token."},"id":null}"#;
        assert_eq!(says(refused(401, None, nameless)), (401, "No token.".into()));
        assert_eq!(
            says(refused(404, None, r#"{"detail":"There is nothing at this path."}"#)),
            (404, "The server answered HTTP 404 Not Found: There is nothing at this path.".into())
        );
        assert_eq!(says(refused(502, None, "<html>")), (502, "The server answered HTTP 502 Bad Gateway.".into()));
        let redirect = says(refused(301, Some("https://h/x"), ""));
        assert!(redirect.1.contains("to https://h, which is not followed"), "{redirect:?}");
    }

    #[test]
    fn a_header_mismatch_is_recognized() {
        assert!(is_header_mismatch(br#"{"id":1,"error":{"code":-32020,"message":"m"}}"#));
        assert!(!is_header_mismatch(br#"{"id":1,"error":{"code":-32602,"message":"-32020"}}"#));
        assert!(!is_header_mismatch(br#"{"id":1,"result":{"error":{"code":-32020}}}"#));
    }
}
