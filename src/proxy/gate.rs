//! What every request to the API must pass before anything of it is believed: one `Host`, no doubled headers, no
//! web page that was not invited. And where the public address of the server is found.

use std::net::IpAddr;

use http::header::{AUTHORIZATION, CONTENT_ENCODING, CONTENT_TYPE, HOST, HeaderName, ORIGIN};
use http::{HeaderMap, HeaderValue, StatusCode};

use crate::protocol::SESSION_SECRET_HEADER;
use crate::proxy::config::Config;

/// Why a request is turned away.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The HTTP status.
    pub status: StatusCode,
    /// A sentence.
    pub message: String,
}

fn refuse<T>(status: StatusCode, message: impl Into<String>) -> Result<T, Refusal> {
    Err(Refusal { status, message: message.into() })
}

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
const SESSION_SECRET: HeaderName = HeaderName::from_static(SESSION_SECRET_HEADER);

/// The rules, worked out from the settings once.
#[derive(Debug)]
pub struct Gate {
    hosts: Vec<String>,
    checks_host: bool,
    origins: Vec<String>,
    allows_loopback_origins: bool,
}

impl Gate {
    /// The gate of a server that listens on `ip`.
    pub fn new(config: &Config, ip: IpAddr) -> Self {
        let mut hosts: Vec<String> = config.allowed_hosts.iter().map(|host| host.to_ascii_lowercase()).collect();
        hosts.extend(config.public_url.iter().map(|url| url.host.clone()));
        // A page that rebinds its name to our address has no token; where none is needed, its name gives it away.
        let has_no_token = config.app_token.is_empty() || config.openclaw_token.is_empty();
        let is_open = has_no_token && config.tenants_file.is_none();
        Gate {
            checks_host: is_open || !hosts.is_empty(),
            hosts,
            origins: config.allowed_origins.clone(),
            allows_loopback_origins: ip.is_loopback(),
        }
    }

    /// Checks a request's headers. `Ok(Some(origin))` if it comes from a web page that is allowed to.
    ///
    /// # Errors
    /// [`Refusal`] with 400 or 403.
    pub fn check<'a>(&self, headers: &'a HeaderMap) -> Result<Option<&'a str>, Refusal> {
        let host = one(headers, &HOST)?;
        one(headers, &AUTHORIZATION)?;
        one(headers, &CONTENT_TYPE)?;
        one(headers, &SESSION_SECRET)?;
        let Some(host) = host.and_then(host_of) else {
            return refuse(StatusCode::BAD_REQUEST, "Exactly one valid Host header is required.");
        };
        if self.checks_host && !self.is_known_host(host) {
            let message = "This Host is not served here; add it to OPENCLAW_PROXY_ALLOWED_HOSTS, or set OPENCLAW_PROXY_PUBLIC_URL.";
            return refuse(StatusCode::FORBIDDEN, message);
        }
        let Some(origin) = one(headers, &ORIGIN)? else { return Ok(None) };
        if self.is_allowed_origin(origin) {
            Ok(Some(origin))
        } else {
            refuse(StatusCode::FORBIDDEN, "This Origin is not allowed; add it to OPENCLAW_PROXY_ALLOWED_ORIGINS.")
        }
    }

    fn is_known_host(&self, host: &str) -> bool {
        is_loopback_name(host) || self.hosts.iter().any(|known| known.eq_ignore_ascii_case(host))
    }

    fn is_allowed_origin(&self, origin: &str) -> bool {
        if self.origins.iter().any(|allowed| allowed.eq_ignore_ascii_case(origin)) {
            return true;
        }
        let Some((scheme, authority)) = origin.split_once("://") else { return false };
        self.allows_loopback_origins
            && matches!(scheme, "http" | "https")
            && host_of(authority).is_some_and(is_loopback_name)
    }
}

/// The host of `host[:port]`, an IPv6 address in its brackets. Stricter than a URL parser, which would take
/// `[::1].evil` and `user@host`.
fn host_of(authority: &str) -> Option<&str> {
    let end = match authority.strip_prefix('[') {
        Some(address) => address.find(']')? + 2,
        None => authority.find(':').unwrap_or(authority.len()),
    };
    let (host, port) = authority.split_at(end);
    let is_number = |port: &str| port.bytes().all(|b| b.is_ascii_digit()) && port.parse::<u16>().is_ok();
    let is_port = port.is_empty() || port.strip_prefix(':').is_some_and(is_number);
    let is_host_char = |b: u8| b.is_ascii_alphanumeric() || b"-._~".contains(&b);
    let is_host = match host.strip_prefix('[') {
        Some(address) => address.trim_end_matches(']').parse::<std::net::Ipv6Addr>().is_ok(),
        None => !host.is_empty() && host.bytes().all(is_host_char),
    };
    (is_port && is_host).then_some(host)
}

/// Whether a request names this machine as its one host, as what runs here does.
pub fn names_loopback(headers: &HeaderMap) -> bool {
    one(headers, &HOST).ok().flatten().and_then(host_of).is_some_and(is_loopback_name)
}

/// `127.x.y.z`, `[::1]` or `localhost`.
fn is_loopback_name(host: &str) -> bool {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    host.eq_ignore_ascii_case("localhost") || bare.parse::<IpAddr>().is_ok_and(|ip| ip.is_loopback())
}

/// The one value of a header; two lines of these headers mean that two parties read the request differently.
fn one<'a>(headers: &'a HeaderMap, name: &HeaderName) -> Result<Option<&'a str>, Refusal> {
    let mut values = headers.get_all(name).iter();
    let Some(value) = values.next() else { return Ok(None) };
    if values.next().is_some() {
        return refuse(StatusCode::BAD_REQUEST, format!("The header {name} is given twice."));
    }
    match std::str::from_utf8(value.as_bytes()) {
        Ok(value) => Ok(Some(value.trim())),
        Err(_) => refuse(StatusCode::BAD_REQUEST, format!("The header {name} is not valid UTF-8.")),
    }
}

/// A media type without its parameters.
pub fn media_type(value: &[u8]) -> &[u8] {
    value.split(|&b| b == b';').next().unwrap_or_default().trim_ascii()
}

/// Checks that the body is JSON as we read it: `application/json`, not compressed.
///
/// # Errors
/// [`Refusal`] with 415.
pub fn check_json_body(headers: &HeaderMap) -> Result<(), Refusal> {
    let content_type = headers.get(CONTENT_TYPE).map_or(&b""[..], HeaderValue::as_bytes);
    if !media_type(content_type).eq_ignore_ascii_case(b"application/json") {
        return refuse(StatusCode::UNSUPPORTED_MEDIA_TYPE, "The Content-Type must be application/json.");
    }
    let encoding = headers.get(CONTENT_ENCODING).map_or(&b"identity"[..], |value| value.as_bytes());
    if !encoding.eq_ignore_ascii_case(b"identity") {
        return refuse(
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
            "A Content-Encoding is not accepted; send the body as it is.",
        );
    }
    Ok(())
}

/// The base of the URLs that an app is given, without a slash at the end: the setting, else what a trusted proxy
/// says, else what the request says. `Forwarded` is never read: common proxies pass on what strangers put in it.
pub fn public_base(config: &Config, headers: &HeaderMap, peer: IpAddr) -> String {
    if let Some(url) = &config.public_url {
        return url.base.clone();
    }
    let is_trusted = config.trusted_proxies.iter().any(|network| network.contains(peer));
    let forwarded = |name: &str| {
        let mut values = headers.get_all(name).iter();
        let value = values.next().filter(|_| is_trusted)?.to_str().ok()?.trim();
        values.next().is_none().then_some(value)
    };
    let scheme = forwarded("x-forwarded-proto").filter(|scheme| matches!(*scheme, "http" | "https")).unwrap_or("http");
    let host = forwarded("x-forwarded-host").filter(|host| host_of(host).is_some());
    let host = host.or_else(|| headers.get(HOST).and_then(|host| host.to_str().ok())).unwrap_or("localhost");
    format!("{scheme}://{host}")
}

/// Whose request it is: the peer, or behind trusted proxies the last address in `X-Forwarded-For` that is none of
/// them. What stands further to the left, anybody can have written.
pub fn client_ip(config: &Config, headers: &HeaderMap, peer: IpAddr) -> IpAddr {
    let is_trusted = |ip: IpAddr| config.trusted_proxies.iter().any(|network| network.contains(ip));
    // Bytes, for what strangers write in a line need not be text, and must not hide what stands to the right of it.
    let lines = headers.get_all(FORWARDED_FOR).iter().rev().map(HeaderValue::as_bytes);
    let mut hops = lines.flat_map(|line| line.rsplit(|&b| b == b','));
    let address = |hop: &[u8]| std::str::from_utf8(hop).ok()?.trim().parse::<IpAddr>().ok();
    let mut client = peer;
    while is_trusted(client) {
        let Some(hop) = hops.next().and_then(address) else { break };
        client = hop.to_canonical();
    }
    client
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Config {
        Config::from_pairs(pairs.iter().map(|(name, value)| (format!("OPENCLAW_PROXY_{name}"), (*value).to_owned())))
            .unwrap()
    }

    fn headers(pairs: &[(&str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(name.parse::<HeaderName>().unwrap(), HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        headers
    }

    const LOOPBACK: IpAddr = IpAddr::V4(std::net::Ipv4Addr::LOCALHOST);
    const OUTSIDE: IpAddr = IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9));

    #[test]
    fn the_host_matters_where_no_token_does() {
        let status = |settings: &[(&str, &str)], host: &str| {
            let gate = Gate::new(&config(settings), LOOPBACK);
            gate.check(&headers(&[("host", host)])).map(|_| ()).map_err(|refusal| refusal.status.as_u16())
        };
        let tokens = [("APP_TOKEN", "a"), ("OPENCLAW_TOKEN", "b")];
        for host in ["127.0.0.1:8000", "localhost", "LOCALHOST:1", "[::1]:80", "127.9.9.9"] {
            assert_eq!(status(&[], host), Ok(()), "{host}");
        }
        for host in ["evil.example", "127.0.0.1.evil.example", "localhost.evil", "10.0.0.1"] {
            assert_eq!(status(&[], host), Err(403), "{host}");
            assert_eq!(status(&tokens[..1], host), Err(403), "{host}");
            assert_eq!(status(&tokens, host), Ok(()), "{host}");
        }
        for host in ["", "a b", "user@localhost", "local host", "localhost:+80", "localhost:65536", "localhost:"] {
            assert_eq!(status(&tokens, host), Err(400), "{host}");
        }
        let named = [tokens[0], tokens[1], ("PUBLIC_URL", "https://mcp.example/x"), ("ALLOWED_HOSTS", "other.example")];
        for (host, expected) in
            [("mcp.example", Ok(())), ("OTHER.example:8", Ok(())), ("127.0.0.1", Ok(())), ("evil.example", Err(403))]
        {
            assert_eq!(status(&named, host), expected, "{host}");
        }
    }

    #[test]
    fn doubled_headers_are_refused() {
        let gate = Gate::new(&config(&[]), LOOPBACK);
        for name in ["host", "authorization", "content-type", "x-session-secret", "origin"] {
            let pairs = [("host", "localhost"), (name, "localhost"), (name, "localhost")];
            let refusal = gate.check(&headers(&pairs)).unwrap_err();
            assert_eq!(refusal.status, 400, "{name}");
            assert!(refusal.message.contains(name));
        }
        assert_eq!(gate.check(&headers(&[])).unwrap_err().status, 400);
    }

    #[test]
    fn only_invited_pages_get_in() {
        let origin = |settings: &[(&str, &str)], ip, origin: &str| {
            let gate = Gate::new(&config(settings), ip);
            gate.check(&headers(&[("host", "localhost"), ("origin", origin)])).is_ok()
        };
        for good in ["http://localhost:3000", "https://127.0.0.1", "http://[::1]:5"] {
            assert!(origin(&[], LOOPBACK, good), "{good}");
            assert!(!origin(&[], OUTSIDE, good), "{good}");
        }
        for bad in [
            "null",
            "https://evil.example",
            "http://localhost.evil",
            "http://[::1].evil",
            "ftp://localhost",
            "http://user@localhost",
            "http://localhost/path",
            "",
            "localhost",
        ] {
            assert!(!origin(&[], LOOPBACK, bad), "{bad}");
        }
        let allowed = [("ALLOWED_ORIGINS", "https://app.example,app://x")];
        assert!(origin(&allowed, OUTSIDE, "https://app.example") && origin(&allowed, OUTSIDE, "app://x"));
        assert!(!origin(&allowed, OUTSIDE, "https://app.example:444") && !origin(&allowed, OUTSIDE, "null"));
    }

    #[test]
    fn bodies_are_plain_json() {
        for good in ["application/json", "Application/JSON; charset=utf-8"] {
            assert!(check_json_body(&headers(&[("content-type", good)])).is_ok());
        }
        for bad in ["", "text/plain", "application/jsonx", "multipart/form-data"] {
            assert_eq!(check_json_body(&headers(&[("content-type", bad)])).unwrap_err().status, 415);
        }
        let gzip = [("content-type", "application/json"), ("content-encoding", "gzip")];
        assert_eq!(check_json_body(&headers(&gzip)).unwrap_err().status, 415);
    }

    #[test]
    fn the_client_is_who_the_last_trusted_proxy_says() {
        let client = |settings: &[(&str, &str)], peer: &str, lines: &[&str]| {
            let pairs: Vec<_> = lines.iter().map(|line| ("x-forwarded-for", *line)).collect();
            client_ip(&config(settings), &headers(&pairs), peer.parse().unwrap()).to_string()
        };
        assert_eq!(client(&[], "127.0.0.1", &["6.6.6.6, 9.9.9.9"]), "9.9.9.9");
        assert_eq!(client(&[], "127.0.0.1", &["6.6.6.6", "9.9.9.9, ::ffff:127.0.0.1"]), "9.9.9.9");
        assert_eq!(client(&[], "10.0.0.9", &["9.9.9.9"]), "10.0.0.9", "a stranger may write what it likes");
        assert_eq!(client(&[], "127.0.0.1", &[]), "127.0.0.1");
        assert_eq!(client(&[], "127.0.0.1", &["9.9.9.9, nonsense"]), "127.0.0.1");
        assert_eq!(client(&[], "127.0.0.1", &["n\u{f6}nsense, 9.9.9.9"]), "9.9.9.9", "what is no ASCII hides nobody");
        assert_eq!(client(&[("TRUSTED_PROXIES", "10.0.0.0/8")], "10.0.0.9", &["9.9.9.9, 10.1.1.1"]), "9.9.9.9");
    }

    #[test]
    fn urls_are_right_behind_a_proxy_and_strangers_cannot_bend_them() {
        let base = |settings: &[(&str, &str)], peer, pairs: &[(&str, &str)]| {
            public_base(&config(settings), &headers(pairs), peer)
        };
        let forwarded =
            [("host", "10.0.0.5:8000"), ("x-forwarded-proto", "https"), ("x-forwarded-host", "mcp.example")];
        assert_eq!(base(&[], LOOPBACK, &forwarded), "https://mcp.example");
        assert_eq!(base(&[], OUTSIDE, &forwarded), "http://10.0.0.5:8000");
        assert_eq!(base(&[("TRUSTED_PROXIES", "10.0.0.0/24")], OUTSIDE, &forwarded), "https://mcp.example");
        assert_eq!(base(&[("PUBLIC_URL", "https://p.example/x/")], OUTSIDE, &forwarded), "https://p.example/x");
        for odd in [
            &[("host", "h"), ("x-forwarded-proto", "https, http")][..],
            &[("host", "h"), ("x-forwarded-proto", "javascript")],
            &[("host", "h"), ("x-forwarded-host", "a, b")],
            &[("host", "h"), ("x-forwarded-host", "u@evil")],
            &[("host", "h"), ("x-forwarded-host", "a"), ("x-forwarded-host", "b")],
            &[("host", "h"), ("forwarded", "proto=https;host=evil")],
        ] {
            assert_eq!(base(&[], LOOPBACK, odd), "http://h", "{odd:?}");
        }
    }
}
