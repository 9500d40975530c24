//! A session of our own: whether an app can register one, and where the URLs that it is given lead.

use http::{HeaderName, Method, StatusCode};
use serde_json::{Value, json};
use url::Url;

use super::explain::{silence, unexpected};
use super::finding::{Check, Finding, Report};
use super::wire::{Answer, Wire, WireError};
use super::{Options, Stop, fixes};
use crate::protocol::SESSION_SECRET_HEADER;

/// A name that nobody has (RFC 2606).
const NOBODY: &str = "doctor.invalid";

/// The tools that are lent, and what they are for. A schema with a number that no double holds shows whether
/// somebody on the way reads and writes JSON.
pub(super) const SCHEMA: &str = r#"{"type":"object","properties":{"n":{"type":"integer","maximum":123456789012345678901234567890}},"x-odd" : [1.10, 1e2]}"#;

/// A registered session.
#[derive(Debug, Clone)]
pub(super) struct Session {
    pub(super) id: String,
    secret: Option<String>,
    mcp_url: String,
    bridge_url: String,
}

impl Session {
    /// One that was never registered.
    pub(super) fn nobody() -> Self {
        Session { id: String::new(), secret: None, mcp_url: String::new(), bridge_url: String::new() }
    }

    /// The headers that an app sends for it beside its token.
    pub(super) fn headers(&self) -> Vec<(HeaderName, String)> {
        let secret = self.secret.iter();
        secret.map(|secret| (HeaderName::from_static(SESSION_SECRET_HEADER), secret.clone())).collect()
    }

    pub(super) fn path(&self) -> String {
        format!("/v1/chat/sessions/{}", self.id)
    }

    pub(super) fn mcp_path(&self) -> String {
        format!("/v1/mcp/{}", self.id)
    }
}

fn registration() -> String {
    let tool = |name: &str, description: &str| {
        format!(r#"{{"name":"{name}","description":"{description}","input_schema":{SCHEMA}}}"#)
    };
    let param = json!({
        "name": "doctor_param",
        "description": "Takes an argument that is repeated in a header.",
        "input_schema": {
            "type": "object",
            "properties": {
                "plain": { "type": "string", "x-mcp-header": "doctor" },
                "under_score": { "type": "string", "x-mcp-header": "doctor_s" },
            },
        },
    });
    let tools = [
        tool("doctor_echo", "Answers with its arguments."),
        tool("doctor_wait", "Answers when it is told to."),
        param.to_string(),
    ];
    format!(
        r#"{{"device_id":"openclaw-mcp-proxy-doctor","device_name":"Doctor","bridge_features":["cancel","progress"],"tools":[{}]}}"#,
        tools.join(",")
    )
}

async fn post(wire: &Wire, options: &Options, headers: &[(&str, &str)]) -> Result<Answer, WireError> {
    let mut request = wire.post("/v1/chat/sessions", &options.app_token);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    wire.send(request, registration()).await
}

fn read(answer: &Answer) -> Option<Session> {
    let body: Value = serde_json::from_slice(&answer.body).ok().filter(|_| answer.status == StatusCode::OK)?;
    let text = |name: &str| body.get(name)?.as_str().map(str::to_owned);
    let (id, mcp_url, bridge_url) = (text("mcpSessionId")?, text("mcp_url")?, text("bridge_url")?);
    // It becomes part of paths and headers.
    let is_id = !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    is_id.then(|| Session { id, secret: text("session_secret"), mcp_url, bridge_url })
}

/// Registers a session.
pub(super) async fn register(wire: &Wire, options: &Options, report: &mut Report) -> Result<Session, Stop> {
    let what = "an app's registration";
    match post(wire, options, &[]).await {
        Ok(answer) => match read(&answer) {
            Some(session) => {
                report.add(Finding::ok(Check::Registration, "An app can register."));
                report.add(public_urls(wire, &session));
                return Ok(session);
            }
            None => report.add(unexpected(&wire.base, Check::Registration, what, &answer)),
        },
        Err(error) => report.add(silence(Check::Registration, what, &error)),
    }
    Err(Stop)
}

/// Compares the URLs that the app was given with the one by which it came.
fn public_urls(wire: &Wire, session: &Session) -> Finding {
    let base = &wire.base;
    let expected = [base.url("ws", &format!("{}/bridge", session.path())), base.url("http", &session.mcp_path())];
    let mut fixes = Vec::new();
    let mut wrong: Vec<&str> = Vec::new();
    for (given, expected) in [&session.bridge_url, &session.mcp_url].into_iter().zip(&expected) {
        let (Ok(given), Ok(expected)) = (Url::parse(given), Url::parse(expected)) else {
            wrong.push("form");
            continue;
        };
        let parts = [
            ("scheme", given.scheme() != expected.scheme()),
            ("host", given.host_str() != expected.host_str()),
            (
                "port",
                given.port() != expected.port()
                    && given.host_str() == expected.host_str()
                    && given.scheme() == expected.scheme(),
            ),
            ("path", given.path() != expected.path()),
        ];
        wrong.extend(parts.iter().filter(|(_, differs)| *differs).map(|(part, _)| *part));
    }
    wrong.sort_unstable();
    wrong.dedup();
    if wrong.is_empty() {
        return Finding::ok(Check::PublicUrls, "The URLs that an app is given lead back here.");
    }
    for part in &wrong {
        fixes.extend(match *part {
            "scheme" => fixes::forwarded_proto(base),
            "path" | "form" => fixes::prefix(base),
            _ => fixes::forwarded_host(base),
        });
    }
    fixes.sort();
    fixes.dedup();
    let shown = super::explain::quote(&session.mcp_url.replace(&session.id, "<id>"));
    let message = format!(
        "An app is given URLs with another {} than the one by which it came: {shown} instead of {}.",
        wrong.join(" and "),
        base.url("http", "/v1/mcp/<id>")
    );
    Finding::problem(Check::PublicUrls, message, fixes)
}

/// Registers a session as somebody who lies about where it came; it must not be believed.
pub(super) async fn register_spoofed(wire: &Wire, options: &Options, honest: &Session) -> (Finding, Option<Session>) {
    let check = Check::SpoofedHeaders;
    let lie = if wire.base.is_tls() { "http" } else { "https" };
    let forwarded = format!("for=192.0.2.1;host={NOBODY};proto={lie}");
    let lies = [
        ("x-forwarded-host", NOBODY),
        ("x-forwarded-proto", lie),
        ("forwarded", &forwarded),
        ("x-forwarded-port", "1"),
    ];
    let session = match post(wire, options, &lies).await {
        Ok(answer) => read(&answer),
        Err(_) => None,
    };
    let Some(session) = session else {
        return (Finding::ok(check, "Requests that lie about the public URL are refused."), None);
    };
    let of = |url: &str, id: &str| url.replace(id, "");
    let is_same = of(&session.mcp_url, &session.id) == of(&honest.mcp_url, &honest.id)
        && of(&session.bridge_url, &session.id) == of(&honest.bridge_url, &honest.id);
    let finding = if is_same {
        Finding::ok(check, "What a stranger writes into X-Forwarded-* is not believed.")
    } else if wire.base.is_loopback() && !wire.base.is_tls() {
        Finding::ok(check, "Not judged: whoever is on this machine may be a reverse proxy.")
    } else {
        let message = "What a stranger writes into X-Forwarded-Host or -Proto becomes part of the URLs that apps are given: the front passes it on.";
        Finding::problem(check, message, fixes::spoofed(&wire.base))
    };
    (finding, Some(session))
}

/// Changes the tools to what they are: PUT must get through.
pub(super) async fn methods(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let registration = registration();
    let tools = crate::json::member(&registration, "tools").unwrap_or("[]");
    let mut request = wire
        .request(Method::PUT, &format!("{}/tools", session.path()), &options.app_token)
        .header(http::header::CONTENT_TYPE, "application/json");
    for (name, value) in session.headers() {
        request = request.header(name, value);
    }
    let answer = wire.send(request, format!(r#"{{"tools":{tools}}}"#)).await;
    passed(wire, "PUT", answer)
}

/// Deletes a session.
pub(super) async fn delete(wire: &Wire, options: &Options, session: &Session) -> Finding {
    let mut request = wire.request(Method::DELETE, &session.path(), &options.app_token);
    for (name, value) in session.headers() {
        request = request.header(name, value);
    }
    let answer = wire.send(request, "").await;
    passed(wire, "DELETE", answer)
}

fn passed(wire: &Wire, method: &str, answer: Result<Answer, WireError>) -> Finding {
    let what = format!("an app's {method}");
    match answer {
        Ok(answer) if answer.status == StatusCode::OK => Finding::ok(Check::Methods, "PUT and DELETE get through."),
        Ok(answer)
            if matches!(answer.status.as_u16(), 403 | 405 | 501) && super::explain::sentence(&answer).is_none() =>
        {
            let message = format!("The front does not let {method} through ({}).", answer.status);
            Finding::problem(Check::Methods, message, fixes::methods(method))
        }
        Ok(answer) => unexpected(&wire.base, Check::Methods, &what, &answer),
        Err(error) => silence(Check::Methods, &what, &error),
    }
}
