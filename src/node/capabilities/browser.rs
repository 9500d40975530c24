//! `browser.proxy`: one request to a browser-control host that listens on this machine.
//!
//! The host holds a browser's reins, so nothing is forwarded unless the node's owner has named its port and its token.
//! Its replies name files; those are only read inside one folder of the owner's choice, and not at all without one.

mod files;

use std::path::PathBuf;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use futures_util::future::BoxFuture;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use serde_json::{Map, Value, json};
use tokio_util::sync::CancellationToken;

use super::{Args, Capability, Image, Request, Response};
use crate::auth::Token;
use crate::http_client::{self, HttpClient, HttpError};

/// The commands, in the order in which they are listed.
const COMMANDS: [&str; 1] = ["browser.proxy"];
/// How long the host may take, if the caller does not say.
const DEFAULT_TIMEOUT_MS: i32 = 20_000;
/// The bounds of how long it may take.
const TIMEOUTS_MS: std::ops::RangeInclusive<i32> = 1..=120_000;
/// The most bytes of a reply. Pictures come as files.
const MAX_REPLY: usize = 16 * 1024 * 1024;
/// The most characters of a reply that says what is wrong.
const MAX_COMPLAINT: usize = 4096;
/// What is kept as it is in a query; everything else is percent-encoded.
const UNRESERVED: &[u8] = b"-._~";

/// A browser-control host.
#[derive(Debug, Clone)]
pub struct Host {
    /// Its port on 127.0.0.1.
    pub port: u16,
    /// What it asks for.
    pub token: Token,
    /// The folder with the files that its replies may name. Without one, no file is read.
    pub files_dir: Option<PathBuf>,
}

/// The capability.
#[derive(Debug, Default)]
pub struct BrowserProxy {
    host: Option<Host>,
}

impl BrowserProxy {
    /// A capability that forwards to `host`; without one it is not listed.
    pub fn new(host: Option<Host>) -> Self {
        BrowserProxy { host }
    }

    async fn proxy(&self, args: &Args, cancel: &CancellationToken) -> Response {
        let Some(host) = &self.host else {
            return Response::failed(
                "Browser control is not set up on this node: its owner has to name the port and the token of a \
                 browser-control host.",
            );
        };
        let forward = match Forward::new(host.port, args) {
            Ok(forward) => forward,
            Err(reason) => return Response::failed(format!("INVALID_REQUEST: {reason}")),
        };
        let answer = tokio::time::timeout(forward.timeout, host.answer(&forward));
        match cancel.run_until_cancelled(answer).await {
            None => Response::failed("cancelled"),
            Some(Err(_)) => {
                let timeout = forward.timeout.as_millis();
                Response::failed(format!("Browser control host did not answer within {timeout} ms"))
            }
            Some(Ok(Err(error))) => Response::failed(error),
            Some(Ok(Ok(result))) => respond(result, host.files_dir.as_deref()).await,
        }
    }
}

/// A reply with the files that it names.
async fn respond(result: Value, folder: Option<&std::path::Path>) -> Response {
    let files = match folder {
        Some(folder) => files::read(&result, folder).await,
        None => Vec::new(),
    };
    let mut payload = Map::from_iter([("result".to_owned(), result)]);
    let mut images = Vec::new();
    let files = files.into_iter().map(|file| {
        if file.mime_type.starts_with("image/") {
            images.push(Image { mime_type: file.mime_type.to_owned(), base64: file.base64.clone() });
        }
        json!({ "path": file.path, "base64": file.base64, "mimeType": file.mime_type })
    });
    let files: Vec<Value> = files.collect();
    if !files.is_empty() {
        payload.insert("files".to_owned(), files.into());
    }
    Response::Done { payload: payload.into(), images }
}

/// A request that is well formed.
#[derive(Debug)]
struct Forward {
    method: Method,
    uri: Uri,
    /// JSON; empty if there is none.
    body: Bytes,
    timeout: Duration,
}

impl Forward {
    fn new(port: u16, args: &Args) -> Result<Self, &'static str> {
        let method = match args.string("method").map(str::to_ascii_uppercase).as_deref() {
            Some("POST") => Method::POST,
            Some("DELETE") => Method::DELETE,
            _ => Method::GET,
        };
        let path = args.string("path").map(str::trim).filter(|path| !path.is_empty()).ok_or("path is required")?;
        if path.contains("://") || path.starts_with("//") {
            return Err("path must be a path, not a URL");
        }
        let slash = if path.starts_with('/') { "" } else { "/" };
        let query = query(args);
        let separator = match (query.is_empty(), path.contains('?')) {
            (true, _) => "",
            (false, false) => "?",
            (false, true) => "&",
        };
        let target = format!("{slash}{path}{separator}{query}");
        let uri = Uri::builder().scheme("http").authority(format!("127.0.0.1:{port}")).path_and_query(target).build();
        let uri = uri.map_err(|_| "path has characters that a path cannot have")?;
        let body = args.get("body").filter(|body| method != Method::GET && !body.is_null());
        let timeout = args.int("timeoutMs").unwrap_or(DEFAULT_TIMEOUT_MS);
        let timeout = timeout.clamp(*TIMEOUTS_MS.start(), *TIMEOUTS_MS.end()).unsigned_abs();
        Ok(Forward {
            method,
            uri,
            body: body.map(|body| body.to_string().into()).unwrap_or_default(),
            timeout: Duration::from_millis(timeout.into()),
        })
    }
}

/// The members of `query`, and `profile`.
fn query(args: &Args) -> String {
    let members = args.get("query").and_then(Value::as_object).into_iter().flatten();
    let members = members.filter(|(_, value)| !value.is_null()).map(|(name, value)| match value {
        Value::String(text) => (name.as_str(), text.clone()),
        other => (name.as_str(), other.to_string()),
    });
    let profile = args.string("profile").map(str::trim).filter(|profile| !profile.is_empty());
    let members = members.chain(profile.map(|profile| ("profile", profile.to_owned())));
    members.map(|(name, value)| format!("{}={}", encoded(name), encoded(&value))).collect::<Vec<_>>().join("&")
}

fn encoded(text: &str) -> String {
    let is_kept = |byte: u8| byte.is_ascii_alphanumeric() || UNRESERVED.contains(&byte);
    text.bytes().map(|byte| if is_kept(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") }).collect()
}

impl Host {
    /// What the host says to a request.
    async fn answer(&self, forward: &Forward) -> Result<Value, String> {
        let client = HttpClient::new(&forward.uri)?;
        let bearer = format!("Bearer {}", self.token.expose());
        let (mut status, mut body) = self.send(&client, forward, &[(AUTHORIZATION.as_str(), &bearer)]).await?;
        if status == StatusCode::UNAUTHORIZED {
            // Hosts with a password instead of a token.
            let password = self.token.expose();
            let basic = format!("Basic {}", BASE64_STANDARD.encode(format!(":{password}")));
            let headers = [(AUTHORIZATION.as_str(), &*basic), ("x-openclaw-password", password)];
            (status, body) = self.send(&client, forward, &headers).await?;
        }
        if status.is_success() {
            let is_blank = body.iter().all(u8::is_ascii_whitespace);
            let reply = if is_blank { Ok(Value::Null) } else { serde_json::from_slice(&body) };
            return reply.map_err(|_| "Browser control host returned invalid JSON".to_owned());
        }
        if status == StatusCode::UNAUTHORIZED {
            return Err("Browser control host refused the token that this node has for it".to_owned());
        }
        let complaint: String = String::from_utf8_lossy(&body).trim().chars().take(MAX_COMPLAINT).collect();
        if complaint.is_empty() {
            return Err(format!("Browser control host answered with status {}", status.as_u16()));
        }
        Err(complaint)
    }

    async fn send(
        &self,
        client: &HttpClient,
        forward: &Forward,
        auth: &[(&'static str, &str)],
    ) -> Result<(StatusCode, Vec<u8>), String> {
        let json = HeaderValue::from_static("application/json");
        let mut headers = HeaderMap::from_iter([(ACCEPT, json.clone())]);
        if !forward.body.is_empty() {
            headers.insert(CONTENT_TYPE, json);
        }
        if !self.token.is_empty() {
            for (name, value) in auth {
                let mut value = HeaderValue::from_str(value)
                    .map_err(|_| "The token for the browser-control host has characters that cannot be sent")?;
                value.set_sensitive(true);
                headers.insert(*name, value);
            }
        }
        let explain = |error: HttpError| match error {
            HttpError::Unreachable(_) => {
                format!("Browser control host is not reachable at 127.0.0.1:{}; is it running?", self.port)
            }
            other => format!("Browser control host {other}"),
        };
        let (method, body) = (forward.method.clone(), forward.body.clone());
        let response = client.send(method, &forward.uri, &headers, body, Duration::ZERO).await.map_err(explain)?;
        let status = response.status();
        Ok((status, http_client::read(response.into_body(), MAX_REPLY).await.map_err(explain)?))
    }
}

impl Capability for BrowserProxy {
    fn category(&self) -> &str {
        "browser"
    }

    fn commands(&self) -> Vec<&str> {
        COMMANDS.to_vec()
    }

    fn is_available(&self, _: &str) -> bool {
        self.host.is_some()
    }

    fn input_schema(&self, command: &str) -> Option<Value> {
        (command == COMMANDS[0]).then(|| {
            json!({
                "type": "object",
                "properties": {
                    "method": { "type": "string", "enum": ["GET", "POST", "DELETE"], "default": "GET" },
                    "path": { "type": "string", "description": "A path at the host, such as /tabs" },
                    "query": { "type": "object", "description": "Members of the query" },
                    "body": { "description": "Any JSON, for POST and DELETE" },
                    "profile": { "type": "string", "description": "The browser profile" },
                    "timeoutMs": {
                        "type": "integer",
                        "minimum": TIMEOUTS_MS.start(),
                        "maximum": TIMEOUTS_MS.end(),
                        "default": DEFAULT_TIMEOUT_MS,
                    },
                },
                "required": ["path"],
                "additionalProperties": true,
            })
        })
    }

    fn execute(&self, request: Request, cancel: CancellationToken) -> BoxFuture<'_, Response> {
        Box::pin(async move {
            match &*request.command {
                "browser.proxy" => self.proxy(&request.args, &cancel).await,
                other => Response::unknown_command(other),
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn forward(args: Value) -> Result<(String, String, String, u128), &'static str> {
        let Forward { method, uri, body, timeout } = Forward::new(9, &Args::new(args))?;
        let body = String::from_utf8(body.to_vec()).unwrap();
        Ok((method.to_string(), uri.to_string(), body, timeout.as_millis()))
    }

    #[test]
    fn a_request_goes_nowhere_but_to_the_host() {
        let uri = |args| forward(args).map(|(_, uri, ..)| uri);
        for (path, is) in [
            ("tabs", "http://127.0.0.1:9/tabs"),
            (" /tabs ", "http://127.0.0.1:9/tabs"),
            ("@evil.example/", "http://127.0.0.1:9/@evil.example/"),
            (":80/", "http://127.0.0.1:9/:80/"),
            ("/a?b=c", "http://127.0.0.1:9/a?b=c"),
        ] {
            assert_eq!(uri(json!({ "path": path })).as_deref(), Ok(is));
        }
        for (path, reason) in [
            (json!(null), "path is required"),
            (json!(1), "path is required"),
            (json!("  "), "path is required"),
            (json!("http://evil.example/"), "path must be a path, not a URL"),
            (json!("/x?to=http://evil.example/"), "path must be a path, not a URL"),
            (json!("//evil.example/"), "path must be a path, not a URL"),
            (json!("/a b"), "path has characters that a path cannot have"),
            (json!("/a\r\nx: y"), "path has characters that a path cannot have"),
        ] {
            assert_eq!(uri(json!({ "path": path })), Err(reason), "{path}");
        }
    }

    #[test]
    fn what_is_forwarded_is_what_was_asked_for() {
        let query =
            json!({ "path": "/x", "profile": " a&b ", "query": { "n": 1, "none": null, "s": "ä /", "t": true } });
        assert_eq!(
            forward(query),
            Ok((
                "GET".into(),
                "http://127.0.0.1:9/x?n=1&s=%C3%A4%20%2F&t=true&profile=a%26b".into(),
                "".into(),
                20_000
            ))
        );
        for (method, sent, body, timeout, waits) in [
            (json!("post"), "POST", r#"{"a":1}"#, json!(0), 1),
            (json!("DELETE"), "DELETE", r#"{"a":1}"#, json!(999_999), 120_000),
            (json!("PUT"), "GET", "", json!("x"), 20_000),
            (json!(1), "GET", "", json!(5), 5),
        ] {
            let args =
                json!({ "path": "/x?y", "method": method, "body": { "a": 1 }, "timeoutMs": timeout, "profile": "p" });
            let uri = "http://127.0.0.1:9/x?y&profile=p".to_owned();
            assert_eq!(forward(args), Ok((sent.into(), uri, body.into(), waits)));
        }
    }
}
