//! What an MCP client does, and what becomes of it on the way: the handshake, the list, calls; headers, bodies, origins.

use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{ACCEPT, ACCESS_CONTROL_ALLOW_ORIGIN, CONTENT_ENCODING, ORIGIN};
use http::{StatusCode, request};

use super::app::{Bridge, Heard};
use super::explain::{quote, sentence, silence, unexpected};
use super::finding::{Check, Finding, Report};
use super::register::{SCHEMA, Session};
use super::wire::{ANSWER_TIMEOUT, Answer, Wire, WireError};
use super::{Options, fixes};
use crate::json;
use crate::mcp::MODERN_VERSION;

/// Arguments that do not survive being read and written again, by anything that keeps numbers as doubles.
const ARGUMENTS: &str = r#"{"n":123456789012345678901234567890, "pi" : 3.14159265358979323846264338327950288,"e":1.0e-7,"zero":-0.0,"text":"\u017dlu\u0165 \ud83d\ude00 <&> Ž😀","twice":[[],{}]}"#;
/// The bytes of the image that a call answers with.
const IMAGE_BYTES: usize = 200_000;
/// How much longer the largest body may take: slow lines are no mistake.
const LARGE_TIMEOUT: Duration = Duration::from_secs(60);
/// What a body takes beside its largest argument.
const ENVELOPE: usize = 1024;

/// A JSON-RPC request.
pub(super) fn rpc(method: &str, params: &str) -> String {
    format!(r#"{{"jsonrpc":"2.0","id":1,"method":"{method}","params":{params}}}"#)
}

/// The head of a POST to an MCP endpoint, as clients up to 2025-11-25 send it.
pub(super) fn client(wire: &Wire, options: &Options, path: &str) -> request::Builder {
    wire.post(path, &options.openclaw_token)
        .header(ACCEPT, "application/json, text/event-stream")
        .header("mcp-protocol-version", "2025-11-25")
}

/// The text of a request's result.
fn result(answer: &Answer) -> Option<String> {
    let text = std::str::from_utf8(&answer.body).ok().filter(|_| answer.status == StatusCode::OK)?;
    json::member(text, "result").map(str::to_owned)
}

/// A call and what came of it: what the app saw of its arguments, if it saw it, and the answer.
struct Called {
    arguments: Option<String>,
    answer: Result<Answer, WireError>,
}

/// Calls a tool, and answers as the app.
async fn call(
    wire: &Wire,
    bridge: &mut Bridge,
    request: request::Builder,
    body: String,
    members: impl Fn(&str) -> String,
    limit: Duration,
) -> Called {
    let sending = super::wire::within(limit, async { wire.begin(request, body).await?.finish().await });
    tokio::pin!(sending);
    let mut seen = None;
    loop {
        tokio::select! {
            answer = &mut sending => return Called { arguments: seen, answer },
            heard = bridge.heard() => match heard {
                Heard::Invoked { request_id, arguments } => {
                    bridge.answer(&request_id, &members(&arguments)).await;
                    seen = Some(arguments);
                }
                Heard::Cancelled { .. } => {}
                // The call fails as well, and says so.
                Heard::Ended(_) => return Called { arguments: seen, answer: sending.await },
            },
        }
    }
}

/// initialize, tools/list and two tools/call; and whether all of it arrives as it was sent.
pub(super) async fn round_trip(
    wire: &Wire,
    options: &Options,
    session: &Session,
    bridge: &mut Bridge,
    report: &mut Report,
) {
    let path = session.mcp_path();
    let initialize =
        r#"{"protocolVersion":"2025-11-25","capabilities":{},"clientInfo":{"name":"doctor","version":"1"}}"#;
    let mut list = String::new();
    for (method, params) in [("initialize", initialize), ("tools/list", "{}")] {
        match wire.send(client(wire, options, &path), rpc(method, params)).await {
            Ok(answer) => match result(&answer) {
                Some(result) => list = result,
                None => return report.add(unexpected(&wire.base, Check::RoundTrip, method, &answer)),
            },
            Err(error) => return report.add(silence(Check::RoundTrip, method, &error)),
        }
    }
    let mut changed = if list.contains(SCHEMA) { Vec::new() } else { vec!["a tool's schema"] };

    let params = format!(r#"{{"name":"doctor_echo","arguments":{ARGUMENTS}}}"#);
    let echo = |arguments: &str| format!(r#""ok":true,"content":{arguments}"#);
    let called =
        call(wire, bridge, client(wire, options, &path), rpc("tools/call", &params), echo, ANSWER_TIMEOUT).await;
    let Some(answer) = judged(wire, &called, report) else { return };
    if called.arguments.as_deref() != Some(ARGUMENTS) {
        changed.push("a call's arguments");
    }
    let result_text = result(&answer).unwrap_or_default();
    if json::member(&result_text, "structuredContent") != called.arguments.as_deref() {
        changed.push("a result");
    }
    report.add(compression(&answer));

    // No pattern that compresses well, so that a limit of the way is one of bytes.
    let image = STANDARD.encode((0..IMAGE_BYTES).map(|i| (i * i % 251) as u8).collect::<Vec<_>>());
    let block = format!(r#"{{"type":"image","data":"{image}","mimeType":"image/png"}}"#);
    let members = |_: &str| format!(r#""ok":true,"result":{{"content":[{block}]}}"#);
    let body = rpc("tools/call", r#"{"name":"doctor_echo","arguments":{}}"#);
    let called = call(wire, bridge, client(wire, options, &path), body, members, ANSWER_TIMEOUT).await;
    let Some(answer) = judged(wire, &called, report) else { return };
    if !result(&answer).is_some_and(|result| result.contains(&block)) {
        changed.push("an image");
    }
    report.add(Finding::ok(Check::RoundTrip, "initialize, tools/list and tools/call get there and back."));
    report.add(if changed.is_empty() {
        Finding::ok(Check::Unchanged, "Schemas, arguments, results and images arrive as they were sent.")
    } else {
        let message = format!("Somebody on the way rewrites bodies: {} arrived changed.", changed.join(", "));
        Finding::problem(Check::Unchanged, message, fixes::unchanged())
    });
}

/// The answer of a call that went well; else it is reported why it did not.
fn judged(wire: &Wire, called: &Called, report: &mut Report) -> Option<Answer> {
    let what = "tools/call";
    match &called.answer {
        Ok(answer) => match result(answer) {
            Some(text) if json::member(&text, "isError") != Some("true") => {
                let Answer { status, version, headers, body } = answer;
                return Some(Answer {
                    status: *status,
                    version: *version,
                    headers: headers.clone(),
                    body: body.clone(),
                });
            }
            Some(text) => {
                let message = format!("{what} fails: {}", quote(&text));
                report.add(Finding::problem(Check::RoundTrip, message, Vec::new()));
            }
            None => report.add(unexpected(&wire.base, Check::RoundTrip, what, answer)),
        },
        Err(error) => report.add(silence(Check::RoundTrip, what, error)),
    }
    None
}

/// Nobody asked for a coding here.
fn compression(answer: &Answer) -> Finding {
    match answer.header(CONTENT_ENCODING) {
        None | Some("identity") => Finding::ok(Check::Compression, "Bodies are not compressed unless a client asks."),
        Some(coding) => {
            let message = format!("Answers are compressed ({}) though the client takes no such thing.", quote(coding));
            Finding::problem(Check::Compression, message, fixes::compression())
        }
    }
}

/// The two headers that may name the session.
pub(super) async fn session_headers(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let check = Check::SessionHeaders;
    let mut lost = Vec::new();
    for header in ["MCP-Session-Id", "X-OpenClaw-Session-Id"] {
        let request = client(wire, options, "/v1/mcp").header(header, &session.id);
        match wire.send(request, rpc("tools/list", "{}")).await {
            Ok(answer) if result(&answer).is_some() => {}
            Ok(answer) if answer.status == StatusCode::BAD_REQUEST && sentence(&answer).is_some() => lost.push(header),
            Ok(answer) => return unexpected(&wire.base, check, &format!("tools/list with {header}"), &answer),
            Err(error) => return silence(check, &format!("tools/list with {header}"), &error),
        }
    }
    if lost.is_empty() {
        return Finding::ok(check, "MCP-Session-Id and X-OpenClaw-Session-Id arrive.");
    }
    let message = format!("The front takes {} away: a client cannot name its session by it.", lost.join(" and "));
    Finding::problem(check, message, fixes::session_headers(&lost))
}

/// What clients of 2026-07-28 repeat in headers.
pub(super) async fn mcp_headers(wire: &Wire, options: &Options, session: &Session, bridge: &mut Bridge) -> Finding {
    let check = Check::McpHeaders;
    let (request, body) = modern(wire, options, session, "doctor_param", r#"{"plain":"a","under_score":"b"}"#);
    let request = request.header("mcp-param-doctor", "a").header("mcp-param-doctor_s", "b");
    let done = |_: &str| r#""ok":true,"content":{}"#.to_owned();
    match call(wire, bridge, request, body, done, ANSWER_TIMEOUT).await.answer {
        Ok(answer) if result(&answer).is_some() => Finding::ok(check, "The headers of MCP 2026-07-28 arrive."),
        Ok(answer) => {
            let says = sentence(&answer).unwrap_or_default();
            let header = says.strip_prefix("The header ").and_then(|rest| rest.strip_suffix(" is missing."));
            match header {
                Some(header) => {
                    let message =
                        format!("The front takes the header {header} away; clients of MCP 2026-07-28 need it.");
                    Finding::problem(check, message, fixes::mcp_headers(header))
                }
                None => unexpected(&wire.base, check, "tools/call of 2026-07-28", &answer),
            }
        }
        Err(error) => silence(check, "tools/call of 2026-07-28", &error),
    }
}

/// tools/call as clients of 2026-07-28 make it.
pub(super) fn modern(
    wire: &Wire,
    options: &Options,
    session: &Session,
    tool: &str,
    arguments: &str,
) -> (request::Builder, String) {
    let request = wire
        .post(&session.mcp_path(), &options.openclaw_token)
        .header(ACCEPT, "application/json, text/event-stream")
        .header("mcp-protocol-version", MODERN_VERSION)
        .header("mcp-method", "tools/call")
        .header("mcp-name", tool);
    let params = format!(
        r#"{{"name":"{tool}","arguments":{arguments},"_meta":{{"progressToken":1,"io.modelcontextprotocol/protocolVersion":"{MODERN_VERSION}","io.modelcontextprotocol/clientInfo":{{"name":"doctor","version":"1"}},"io.modelcontextprotocol/clientCapabilities":{{}}}}}}"#
    );
    (request, rpc("tools/call", &params))
}

/// A slash at the end of the path.
pub(super) async fn trailing_slash(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let check = Check::TrailingSlash;
    let request = client(wire, options, &format!("{}/", session.mcp_path()));
    match wire.send(request, rpc("ping", "{}")).await {
        Ok(answer) if result(&answer).is_some() => Finding::ok(check, "A slash at the end of the URL does no harm."),
        Ok(answer) => Finding { check, ..unexpected(&wire.base, check, "a URL with a slash at its end", &answer) },
        Err(error) => silence(check, "a URL with a slash at its end", &error),
    }
}

/// A web page that nobody invited.
pub(super) async fn origin(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let check = Check::Origin;
    let request = client(wire, options, &session.mcp_path()).header(ORIGIN, "https://doctor.invalid");
    match wire.send(request, rpc("ping", "{}")).await {
        Ok(answer) if result(&answer).is_some() => {
            let message =
                "A web page of anybody's gets through: the front takes Origin away, or the proxy allows every page.";
            Finding::problem(check, message, fixes::origin())
        }
        Ok(answer) if answer.headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) => {
            let message = "The front tells browsers that any page may read the answers (Access-Control-Allow-Origin).";
            Finding::problem(check, message, fixes::cors())
        }
        Ok(answer) if answer.status == StatusCode::FORBIDDEN => {
            Finding::ok(check, "Web pages that nobody invited are refused.")
        }
        Ok(answer) => unexpected(&wire.base, check, "a request of a web page", &answer),
        Err(error) => silence(check, "a request of a web page", &error),
    }
}

/// A call whose arguments are as large as may be, and a result of the same size.
pub(super) async fn body_size(wire: &Wire, options: &Options, session: &Session, bridge: &mut Bridge) -> Finding {
    let check = Check::BodySize;
    let limit = options.max_body_bytes;
    let argument = "x".repeat(limit.saturating_sub(ENVELOPE));
    let body = rpc("tools/call", &format!(r#"{{"name":"doctor_echo","arguments":{{"x":"{argument}"}}}}"#));
    let size = body.len();
    let echo = |arguments: &str| format!(r#""ok":true,"content":{}"#, json::member(arguments, "x").unwrap_or("null"));
    let request = client(wire, options, &session.mcp_path());
    let called = call(wire, bridge, request, body, echo, LARGE_TIMEOUT).await;
    match called.answer {
        Ok(answer) if result(&answer).is_some() => Finding::ok(check, format!("{size} bytes get there and back.")),
        Ok(answer) => match (answer.status, sentence(&answer)) {
            (StatusCode::PAYLOAD_TOO_LARGE, Some(says)) => {
                Finding::ok(check, format!("The proxy itself sets the limit: {}", quote(&says)))
            }
            (StatusCode::PAYLOAD_TOO_LARGE, None) => {
                let message = format!("The front refuses a body of {size} bytes (413), which the proxy would take.");
                Finding::problem(check, message, fixes::body_size(size))
            }
            _ => unexpected(&wire.base, check, "a large call", &answer),
        },
        Err(WireError::Broken(why)) => {
            let message = format!("The front breaks off a body of {size} bytes ({}).", quote(&why));
            Finding::problem(check, message, fixes::body_size(size))
        }
        Err(error) => {
            let message = format!("A body of {size} bytes does not get there and back: {error}.");
            Finding::warning(check, message, fixes::body_size(size))
        }
    }
}
