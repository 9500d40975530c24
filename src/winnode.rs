//! The command line for one call of the local MCP server: arguments in, one POST, a result out.
//!
//! The result goes to stdout and everything else to stderr. No redirect is followed, since the token would go along.
//! Exit codes: 0 it worked, 1 it did not, 2 the arguments are wrong.

pub mod access;
pub mod args;
pub mod sanitize;

use std::io::{self, Write};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, StatusCode, Uri};
use reqwest::Url;
use serde_json::Value;

use crate::http_client::{self, HttpClient, HttpError};
use crate::json;
use crate::node::local_mcp::message::{self, Members};
use crate::process::VERSION;
use access::Source;
use args::{Args, USAGE};
use sanitize::sanitize;

/// It worked.
const OK: u8 = 0;
/// It did not work.
const FAILED: u8 = 1;
/// The arguments are wrong.
const BAD_ARGS: u8 = 2;
/// How much longer than the command the whole request may take.
const REQUEST_GRACE: Duration = Duration::from_secs(5);
/// The largest answer.
const MAX_ANSWER_BYTES: usize = 16 * 1024 * 1024;

/// Why there is no result: the exit code, and a sentence. The sentence is ours, or was made safe.
struct Failure(u8, String);

/// Does what the arguments say and gives the exit code. `env` reads the environment.
pub async fn run(
    args: &[String],
    env: impl Fn(&str) -> Option<String>,
    out: &mut impl Write,
    err: &mut impl Write,
) -> u8 {
    if args.is_empty() || args.iter().any(|arg| arg == "--help" || arg == "-h") {
        let code = if args.is_empty() { BAD_ARGS } else { OK };
        return out.write_all(USAGE.as_bytes()).map_or(FAILED, |()| code);
    }
    if let [only] = args
        && matches!(&**only, "--version" | "-V")
    {
        return writeln!(out, "winnode {VERSION}").map_or(FAILED, |()| OK);
    }
    let parsed = match Args::parse(args) {
        Ok(parsed) => parsed,
        Err(why) => {
            // Without a usable stderr the code still tells.
            let _written = (complain(err, &sanitize(&why, false)), out.write_all(USAGE.as_bytes()));
            return BAD_ARGS;
        }
    };
    let written = match call(&parsed, env, err).await {
        Ok(text) => out.write_all(format!("{text}\n").as_bytes()).and_then(|()| out.flush()).map(|()| OK),
        Err(Failure(code, why)) => complain(err, &why).map(|()| code),
    };
    written.unwrap_or(FAILED)
}

fn complain(err: &mut impl Write, why: &str) -> io::Result<()> {
    writeln!(err, "[winnode] {why}")
}

/// Makes the call and gives what is to be printed.
async fn call(args: &Args, env: impl Fn(&str) -> Option<String>, err: &mut impl Write) -> Result<String, Failure> {
    let mut warnings = Vec::new();
    if args.mcp_token.is_some() {
        warnings.push("--mcp-token is shown by process listings; set OPENCLAW_MCP_TOKEN instead.".to_owned());
    }
    if args.idempotency_key.is_some() {
        warnings.push("--idempotency-key has no effect on local calls.".to_owned());
    }
    warn(err, &mut warnings);
    let body = body(args).map_err(|why| Failure(BAD_ARGS, why))?;
    let mut notes = Vec::new();
    let url = access::endpoint(args, &env, &mut notes).map_err(|why| Failure(BAD_ARGS, why))?;
    let identity = access::identity(args, &env).map_err(|why| Failure(BAD_ARGS, why))?;
    let credential = access::credential(args, identity, &url, &env, &mut warnings);
    warn(err, &mut warnings);
    let credential = credential.map_err(|why| Failure(FAILED, why))?;
    if args.verbose {
        warn(err, &mut notes);
        describe(args, &url, credential.as_ref().map(|(_, source)| *source), err);
    }
    let mut headers = HeaderMap::new();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json; charset=utf-8"));
    if let Some((token, _)) = credential {
        let mut value = HeaderValue::try_from(format!("Bearer {}", token.expose()))
            .map_err(|_| Failure(FAILED, "the token cannot be sent.".to_owned()))?;
        value.set_sensitive(true);
        headers.insert(AUTHORIZATION, value);
    }
    let patience = Duration::from_millis(args.invoke_timeout_ms.into()) + REQUEST_GRACE;
    let answered = tokio::time::timeout(patience, post(&url, &headers, body.into())).await;
    let (status, answer) = answered.map_err(|_| {
        Failure(FAILED, format!("the request to {} timed out after {} ms.", shown(&url), patience.as_millis()))
    })??;
    let text = String::from_utf8_lossy(&answer);
    if !status.is_success() {
        let said = sanitize(&text, args.verbose);
        return Err(Failure(FAILED, format!("HTTP {}: {said}", status.as_u16())));
    }
    read_answer(&text, args.verbose).map_err(|why| Failure(FAILED, why))
}

/// Prints warnings. If stderr is closed nobody wants them.
fn warn(err: &mut impl Write, warnings: &mut Vec<String>) {
    for warning in warnings.drain(..) {
        let _written = complain(err, &format!("WARN: {warning}"));
    }
}

/// What `--verbose` says before the call.
fn describe(args: &Args, url: &Url, source: Option<Source>, err: &mut impl Write) {
    let mut lines = vec![format!("endpoint: {}", shown(url))];
    lines.push(format!("command: {}", sanitize(args.command.as_deref().unwrap_or("tools/list"), false)));
    lines.push(format!("auth: {}", source.map_or("none", Source::label)));
    lines.extend(args.node.is_some().then(|| "--node is ignored: there is one local node.".to_owned()));
    lines.extend(args.idempotency_key.is_some().then(|| "--idempotency-key is ignored.".to_owned()));
    for line in lines {
        let _written = complain(err, &line);
    }
}

/// A URL as it is printed: a query may hold a secret.
fn shown(url: &Url) -> String {
    sanitize(url.as_str(), false)
}

/// The request's body. Arguments stay the text that was given.
fn body(args: &Args) -> Result<String, String> {
    let Some(command) = &args.command else {
        return Ok(r#"{"jsonrpc":"2.0","id":1,"method":"tools/list"}"#.to_owned());
    };
    let params = match args.params.strip_prefix('@') {
        Some("") => return Err("--params @ needs the name of a file.".to_owned()),
        Some(file) => std::fs::read_to_string(file)
            .map_err(|error| format!("the file of --params cannot be read ({}).", error.kind()))?,
        None => args.params.clone(),
    };
    let params = params.trim_start_matches('\u{feff}').trim();
    if let Err(error) = json::check(params, json::MAX_DEPTH) {
        return Err(format!("--params is not valid JSON: {error}."));
    }
    if !json::is_object(params) {
        return Err("--params must be a JSON object.".to_owned());
    }
    let name = Value::from(command.as_str());
    Ok(format!(r#"{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":{name},"arguments":{params}}}}}"#))
}

async fn post(url: &Url, headers: &HeaderMap, body: Bytes) -> Result<(StatusCode, Vec<u8>), Failure> {
    let failed = |why: String| Failure(FAILED, why);
    let uri: Uri = url.as_str().parse().map_err(|_| Failure(BAD_ARGS, "--mcp-url cannot be used.".to_owned()))?;
    let client = HttpClient::new(&uri).map_err(failed)?;
    let response = client.post_once(&uri, headers, body).await.map_err(|error| {
        let hint = match error {
            HttpError::Unreachable(_) => " Is the local MCP server enabled and running?",
            _ => "",
        };
        failed(format!("{} {}.{hint}", shown(url), sanitize(&error.to_string(), false)))
    })?;
    let status = response.status();
    let answer = http_client::read(response.into_body(), MAX_ANSWER_BYTES).await;
    answer.map(|answer| (status, answer)).map_err(|error| failed(format!("{} {error}.", shown(url))))
}

/// What is to be printed of a JSON-RPC response.
fn read_answer(text: &str, verbose: bool) -> Result<String, String> {
    let safe = |text: &str| sanitize(text, verbose);
    let Some(answer) = message::members(text.trim()) else {
        return Err(format!("the answer is not a JSON object: {}", safe(text)));
    };
    if let Some(error) = member(&answer, "error") {
        let error = message::members(error).unwrap_or_default();
        let code = member(&error, "code").and_then(|code| code.parse::<i64>().ok()).unwrap_or(0);
        let message = member(&error, "message").and_then(message::string);
        return Err(format!("JSON-RPC error {code}: {}", safe(message.as_deref().unwrap_or("(no message)"))));
    }
    let Some(result) = member(&answer, "result") else {
        return Err(format!("the answer holds no result: {}", safe(text)));
    };
    let members = message::members(result).unwrap_or_default();
    let content = member(&members, "content").and_then(|content| serde_json::from_str::<Value>(content).ok());
    let first = content.as_ref().and_then(|content| content.get(0)?.get("text")?.as_str());
    if member(&members, "isError") == Some("true") {
        return Err(safe(first.unwrap_or("tool execution failed")));
    }
    let printed = first.unwrap_or(result);
    Ok(pretty(printed).unwrap_or_else(|| printed.to_owned()))
}

/// The text of a member that is not `null`.
fn member<'a>(members: &Members<'a>, name: &str) -> Option<&'a str> {
    members.get(name).map(|value| value.get()).filter(|text| *text != "null")
}

/// JSON with two spaces of indentation, its members and numbers as they were; `None` for any other text.
fn pretty(text: &str) -> Option<String> {
    json::check(text, json::MAX_DEPTH).ok()?;
    let mut escaped = vec![b'"'];
    json::push_pretty_escaped(&mut escaped, text);
    escaped.push(b'"');
    serde_json::from_slice(&escaped).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_stay_as_they_were_given() {
        let body = |params: &str| {
            super::body(&Args { command: Some("a\"b".into()), params: params.to_owned(), ..Args::default() })
        };
        let expected = r#"{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"a\"b","arguments":{"z":1.0,"a":[1E2,{}]}}}"#;
        assert_eq!(body(r#" {"z":1.0,"a":[1E2,{}]} "#).unwrap(), expected);
        for bad in ["[]", "\"s\"", "42", "true", "null"] {
            assert!(body(bad).unwrap_err().contains("must be a JSON object"), "{bad}");
        }
        for bad in ["", "{", "{\"a\":1,}", "nonsense"] {
            assert!(body(bad).unwrap_err().contains("not valid JSON"), "{bad}");
        }
        assert!(body("@").is_err() && body("@/no/such/file").is_err());
    }

    #[test]
    fn a_result_is_printed_and_everything_else_is_an_error() {
        let answer = |text: &str| read_answer(text, false);
        let result = |result: &str| read_answer(&format!(r#"{{"jsonrpc":"2.0","id":1,"result":{result}}}"#), false);
        let inner = r#"{"content":[{"type":"text","text":"{\"b\":1.0,\"a\":[]}"}],"isError":false}"#;
        assert_eq!(result(inner).unwrap(), "{\n  \"b\": 1.0,\n  \"a\": []\n}");
        assert_eq!(result(r#"{"content":[{"text":"plain {"}]}"#).unwrap(), "plain {");
        for whole in [r#"{"tools":[]}"#, r#"{"content":7}"#, r#"{"content":[]}"#, r#"{"content":[{"text":7}]}"#] {
            let printed: Value = serde_json::from_str(&result(whole).unwrap()).unwrap();
            assert_eq!(printed, serde_json::from_str::<Value>(whole).unwrap());
            assert!(result(whole).unwrap().starts_with("{\n  \""));
        }
        assert_eq!(result(r#"{"content":[{"text":"no\nmore"}],"isError":true}"#).unwrap_err(), "no");
        assert_eq!(result(r#"{"isError":true}"#).unwrap_err(), "tool execution failed");
        assert_eq!(answer(r#"{"error":{"code":-32601,"message":"m"}}"#).unwrap_err(), "JSON-RPC error -32601: m");
        assert_eq!(answer(r#"{"error":{}}"#).unwrap_err(), "JSON-RPC error 0: (no message)");
        assert!(answer(r#"{"id":1}"#).unwrap_err().contains(r#"{"id":1}"#));
        assert!(answer("<html>").unwrap_err().contains("<html>") && answer("[1]").is_err());
    }
}
