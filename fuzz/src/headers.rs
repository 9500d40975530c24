//! Headers of a request: lines of `name: value`, an empty line, and the arguments of a call. Who is let in is who a
//! URL parser would let in, nobody can write their way past what the proxy in front says, and headers that repeat
//! arguments say the same as the arguments.

use std::net::IpAddr;

use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, HeaderName, HeaderValue, ORIGIN};
use http::{HeaderMap, StatusCode};
use openclaw_mcp_proxy::mcp::headers::{ParamHeaders, expect_params};
use openclaw_mcp_proxy::protocol::SessionId;
use openclaw_mcp_proxy::proxy::config::Config;
use openclaw_mcp_proxy::proxy::gate::{Gate, check_json_body, client_ip, public_base};
use serde_json::Value;
use url::{Host, Url};

use super::node_id::same_number;

const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
const STRANGER: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(203, 0, 113, 9));

/// Checks the headers of one request.
pub fn check(data: &[u8]) {
    let (headers, body) = read(data);
    let open = config(&[]);
    let named = config(&[
        ("APP_TOKEN", "an-app-token"),
        ("OPENCLAW_TOKEN", "a-client-token"),
        ("ALLOWED_HOSTS", "mcp.example"),
        ("ALLOWED_ORIGINS", "https://app.example"),
    ]);
    gate(&open, &headers, &["localhost"], &[], true);
    gate(&named, &headers, &["localhost", "mcp.example"], &["https://app.example"], true);
    gate(&named, &headers, &["localhost", "mcp.example"], &["https://app.example"], false);
    base(&open, &headers);
    client(&open, &headers);
    if check_json_body(&headers).is_ok() {
        let value = headers[CONTENT_TYPE].to_str().expect("it is ASCII").to_ascii_lowercase();
        assert!(value.trim().starts_with("application/json"), "{value}");
    }
    for value in headers.values().filter_map(|value| value.to_str().ok()) {
        let id = SessionId::parse(value);
        let is_one = value.len() == 32 && value.bytes().all(|b| b"0123456789abcdef".contains(&b));
        assert_eq!(id.map(|id| id.to_string()), is_one.then(|| value.to_owned()));
    }
    repeated(&headers, body);
}

fn read(data: &[u8]) -> (HeaderMap, &[u8]) {
    let mut headers = HeaderMap::new();
    let mut rest = data;
    loop {
        let end = rest.iter().position(|&b| b == b'\n').unwrap_or(rest.len());
        let (line, after) = (&rest[..end], rest.get(end + 1..).unwrap_or_default());
        if line.is_empty() || headers.len() > 64 {
            return (headers, after);
        }
        rest = after;
        let Some(colon) = line.iter().position(|&b| b == b':') else { continue };
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii());
        if let (Ok(name), Ok(value)) = (HeaderName::from_bytes(&line[..colon]), value) {
            headers.append(name, value);
        }
    }
}

fn config(settings: &[(&str, &str)]) -> Config {
    let named = |(name, value): &(&str, &str)| (format!("OPENCLAW_PROXY_{name}"), (*value).to_owned());
    Config::from_pairs(settings.iter().map(named)).expect("these settings are good")
}

fn is_loopback(url: &Url) -> bool {
    match url.host() {
        Some(Host::Domain(name)) => name == "localhost",
        Some(Host::Ipv4(ip)) => ip.is_loopback(),
        Some(Host::Ipv6(ip)) => ip.is_loopback(),
        None => false,
    }
}

/// Whoever is let in has one Host, and it is ours; a page is one that a browser, too, would take for an allowed one.
fn gate(config: &Config, headers: &HeaderMap, hosts: &[&str], origins: &[&str], on_loopback: bool) {
    let ip = if on_loopback { LOOPBACK } else { STRANGER };
    let origin = match Gate::new(config, ip).check(headers) {
        Ok(origin) => origin,
        Err(refusal) => {
            assert!([StatusCode::BAD_REQUEST, StatusCode::FORBIDDEN].contains(&refusal.status));
            return;
        }
    };
    for name in [&AUTHORIZATION, &CONTENT_TYPE, &ORIGIN, &HOST, &HeaderName::from_static("x-session-secret")] {
        let lines = headers.get_all(name).iter().count();
        assert!(lines <= 1 && (lines == 1 || name != HOST), "{name}: {lines}");
    }
    let host = std::str::from_utf8(headers[HOST].as_bytes()).expect("it was let in").trim();
    let url = Url::parse(&format!("http://{host}")).unwrap_or_else(|error| panic!("{error}: {host}"));
    let named = url.host_str().unwrap_or_default();
    assert!(is_loopback(&url) || hosts.contains(&named), "{host}");
    assert_eq!((url.path(), url.username(), url.query(), url.fragment()), ("/", "", None, None), "{host}");
    match (origin, headers.get(ORIGIN)) {
        (None, None) => {}
        (Some(origin), Some(_)) if origins.iter().any(|allowed| origin.eq_ignore_ascii_case(allowed)) => {}
        (Some(origin), Some(_)) => {
            let page = Url::parse(origin).unwrap_or_else(|error| panic!("{error}: {origin}"));
            assert!(on_loopback && is_loopback(&page), "{origin}");
        }
        odd => panic!("{odd:?}"),
    }
}

/// What apps are given as the proxy's address is an address, and nothing that strangers say is in it.
fn base(config: &Config, headers: &HeaderMap) {
    if Gate::new(config, LOOPBACK).check(headers).is_err() {
        return;
    }
    for peer in [LOOPBACK, STRANGER] {
        let base = public_base(config, headers, peer);
        let (scheme, authority) = base.split_once("://").expect("it has a scheme");
        assert!(scheme == "http" || (scheme == "https" && peer == LOOPBACK), "{base}");
        let is_plain = |b: u8| b.is_ascii_alphanumeric() || b"-._~:[]".contains(&b);
        assert!(!authority.is_empty() && authority.bytes().all(is_plain), "{base}");
        if let Ok(url) = Url::parse(&base) {
            assert_eq!((url.path(), url.username(), url.password()), ("/", "", None), "{base}");
        }
        if peer == STRANGER {
            assert_eq!(headers[HOST], authority);
        }
    }
}

/// Whatever a stranger writes to the left of what the proxy in front adds: the client is who that proxy saw.
fn client(config: &Config, headers: &HeaderMap) {
    const NAME: HeaderName = HeaderName::from_static("x-forwarded-for");
    assert_eq!(client_ip(config, headers, STRANGER), STRANGER);
    let seen = "198.51.100.7";
    let mut lines: Vec<&[u8]> = headers.get_all(NAME).iter().map(HeaderValue::as_bytes).collect();
    let own_line = {
        let mut headers = headers.clone();
        headers.append(NAME, HeaderValue::from_static("198.51.100.7"));
        headers
    };
    assert_eq!(client_ip(config, &own_line, LOOPBACK).to_string(), seen);
    lines.push(seen.as_bytes());
    let mut joined = HeaderMap::new();
    joined.insert(NAME, HeaderValue::from_bytes(&lines.join(&b", "[..])).expect("its parts are values"));
    assert_eq!(client_ip(config, &joined, LOOPBACK).to_string(), seen);
}

/// A header that is taken for the argument says what the argument says.
fn repeated(headers: &HeaderMap, body: &[u8]) {
    let Ok(body) = std::str::from_utf8(body) else { return };
    if openclaw_mcp_proxy::json::check(body, 64).is_err() || !body.starts_with('{') {
        return;
    }
    let arguments = super::json(body);
    for name in ["s", "n", "b"] {
        let params = ParamHeaders::of(&serde_json::json!({ "properties": { name: { "x-mcp-header": name } } }));
        let agrees = expect_params(headers, &params, body).is_ok();
        let mut times = 0;
        openclaw_mcp_proxy::json::members(body, |key, _| times += usize::from(key == name)).expect("it is an object");
        if times > 1 {
            assert!(!agrees, "two readers could differ");
            continue;
        }
        let given = headers.get(format!("mcp-param-{name}")).map(|value| value.to_str().unwrap_or_default().trim());
        match (&arguments[name], given) {
            (Value::Null, given) => assert_eq!(agrees, given.is_none()),
            (_, None) => assert!(!agrees),
            (_, Some(given)) if given.starts_with("=?base64?") => {}
            (Value::String(text), Some(given)) if agrees => assert_eq!(text, given),
            (Value::Bool(flag), Some(given)) if agrees => assert_eq!(flag.to_string(), given),
            (Value::Number(_), Some(given)) if agrees => {
                let argument = openclaw_mcp_proxy::json::member(body, name).expect("it is there");
                assert!(same_number(given, argument).unwrap_or(true), "{given} {argument}");
            }
            _ => {}
        }
    }
}
