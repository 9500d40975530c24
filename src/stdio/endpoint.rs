//! Where requests go and which session they are for: flags and environment, checked.
//!
//! What is wrong here is no reason to exit: the client would show "server disconnected" and hide stderr. It is told
//! in the answer to every request instead.

use http::uri::{PathAndQuery, Scheme};
use http::{HeaderValue, Uri};

use crate::auth::Token;
use crate::json;

/// The proxy's base URL if none is given.
pub const DEFAULT_BASE_URL: &str = "http://127.0.0.1:8000";

/// The settings as they were given; empty texts count as not given.
#[derive(Debug, Clone, Default)]
pub struct Options {
    /// `--proxy-base-url`, or `OPENCLAW_PROXY_SERVER_URL`.
    pub base_url: Option<String>,
    /// `--url`: a whole MCP endpoint, which needs no session.
    pub url: Option<String>,
    /// `--token`, or `OPENCLAW_PROXY_OPENCLAW_TOKEN`.
    pub token: Token,
    /// `--session-id`, or `OPENCLAW_PROXY_SESSION_ID`.
    pub session_id: Option<String>,
}

/// An MCP endpoint.
#[derive(Debug, Clone)]
pub struct Endpoint {
    /// Its URL.
    pub uri: Uri,
    /// Scheme, host and port: what messages may tell of the URL, whose path can be a secret.
    pub origin: String,
    /// `Bearer …`.
    pub authorization: Option<HeaderValue>,
    /// Whether requests must name their session in a header, because the URL does not.
    pub needs_session: bool,
}

/// The session of the requests, or why there is none: a sentence for the client's user.
pub type Binding = Result<HeaderValue, String>;

/// Why an unbound client is told that it is.
const UNBOUND: &str = "No chat session is bound. Name it in one of three ways: 'mcpSessionId' in the params of initialize, the flag --session-id, or the environment variable OPENCLAW_PROXY_SESSION_ID.";

impl Options {
    /// Checks the URL and the token.
    ///
    /// # Errors
    /// A sentence for the client's user.
    pub fn endpoint(&self) -> Result<Endpoint, String> {
        let given =
            |text: &Option<String>| text.as_deref().map(str::trim).filter(|text| !text.is_empty()).map(str::to_owned);
        let (name, url, needs_session) = match given(&self.url) {
            Some(url) => ("--url", url, false),
            None => {
                let base = given(&self.base_url).unwrap_or_else(|| DEFAULT_BASE_URL.to_owned());
                if base.contains("/v1/mcp") {
                    return Err("The proxy's URL is not usable: OPENCLAW_PROXY_SERVER_URL must end before '/v1/mcp'; a whole MCP URL is given with --url.".into());
                }
                ("OPENCLAW_PROXY_SERVER_URL", format!("{}/v1/mcp", base.trim_end_matches('/')), true)
            }
        };
        if url.contains("${") {
            return Err(not_expanded("The proxy's URL", name));
        }
        let uri = url.parse::<Uri>().ok().filter(is_http_url);
        let uri = uri.ok_or_else(|| format!("The proxy's URL is not usable: {name} must be http://host[:port] or https://host[:port], with a path if need be."))?;
        Ok(Endpoint {
            origin: format!(
                "{}://{}",
                uri.scheme().unwrap_or(&Scheme::HTTP),
                uri.authority().map_or("", |a| a.as_str())
            ),
            authorization: self.authorization()?,
            uri,
            needs_session,
        })
    }

    fn authorization(&self) -> Result<Option<HeaderValue>, String> {
        let token = self.token.expose().trim();
        if token.is_empty() {
            return Ok(None);
        }
        if token.contains("${") {
            return Err(not_expanded("The bearer token", "OPENCLAW_PROXY_OPENCLAW_TOKEN"));
        }
        if !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err("The bearer token is not usable: OPENCLAW_PROXY_OPENCLAW_TOKEN must consist of visible ASCII characters.".into());
        }
        let value = HeaderValue::try_from(format!("Bearer {token}"));
        let mut value = value.map_err(|_| "The bearer token is not usable.".to_owned())?;
        value.set_sensitive(true);
        Ok(Some(value))
    }

    /// The session that the flag or the environment names.
    ///
    /// # Errors
    /// A sentence for the client's user.
    pub fn binding(&self) -> Binding {
        session(self.session_id.as_deref().unwrap_or_default())
    }
}

fn is_http_url(uri: &Uri) -> bool {
    let has_scheme = uri.scheme() == Some(&Scheme::HTTP) || uri.scheme() == Some(&Scheme::HTTPS);
    let has_host = uri.authority().is_some_and(|a| !a.host().is_empty() && !a.as_str().contains('@'));
    has_scheme && has_host && uri.path_and_query().is_some_and(|path| path != &PathAndQuery::from_static("*"))
}

fn not_expanded(what: &str, name: &str) -> String {
    format!(
        "{what} is a literal ${{…}}: the client did not expand a variable of its configuration. Write the value itself into {name}."
    )
}

/// The header value of a session's id.
fn session(id: &str) -> Binding {
    let id = id.trim();
    if id.is_empty() {
        return Err(UNBOUND.into());
    }
    if id.contains("${") {
        return Err(not_expanded(
            "The session id",
            "OPENCLAW_PROXY_SESSION_ID, --session-id or initialize's mcpSessionId",
        ));
    }
    // The proxy reads a comma as the end of an id.
    let is_plain = id.bytes().all(|byte| byte.is_ascii_graphic() && byte != b',');
    let mut value = HeaderValue::from_str(id)
        .ok()
        .filter(|_| is_plain)
        .ok_or("The session id is not usable: it must be the mcpSessionId that the proxy gave to the app.")?;
    // Who knows the id can call the session's tools.
    value.set_sensitive(true);
    Ok(value)
}

/// The session that `initialize.params.mcpSessionId` names, from the member's JSON text; `None` if it names none.
pub fn session_of_member(member: &str) -> Option<Binding> {
    match json::as_string(member) {
        Some(id) => (!id.trim().is_empty()).then(|| session(&id)),
        None if member == "null" => None,
        None => Some(Err("params.mcpSessionId must be a string.".into())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn some(text: &str) -> Option<String> {
        Some(text.to_owned())
    }

    #[test]
    fn the_url_is_the_base_with_the_mcp_path_or_the_whole_one() {
        let uri = |base: Option<&str>, url: Option<&str>| {
            let options =
                Options { base_url: base.map(str::to_owned), url: url.map(str::to_owned), ..Options::default() };
            options.endpoint().map(|endpoint| (endpoint.uri.to_string(), endpoint.needs_session, endpoint.origin))
        };
        let expect = |url: &str, needs_session, origin: &str| Ok((url.to_owned(), needs_session, origin.to_owned()));
        assert_eq!(uri(None, None), expect("http://127.0.0.1:8000/v1/mcp", true, "http://127.0.0.1:8000"));
        assert_eq!(uri(Some(""), Some(" ")), uri(None, None));
        assert_eq!(uri(Some("https://h/x/"), None), expect("https://h/x/v1/mcp", true, "https://h"));
        assert_eq!(uri(Some("x"), Some("http://h:1/v1/mcp/id")), expect("http://h:1/v1/mcp/id", false, "http://h:1"));
        for bad in ["localhost:8000", "ftp://h", "http://", "/v1/mcp", "http://u:p@h", "ws://h", "http://h h"] {
            let error = uri(Some(bad), None).unwrap_err();
            assert!(error.contains("OPENCLAW_PROXY_SERVER_URL") && error.ends_with('.'), "{bad}: {error}");
        }
        assert!(uri(Some("http://h/v1/mcp/id"), None).unwrap_err().contains("--url"));
        assert!(uri(Some("${URL}"), None).unwrap_err().contains("literal ${…}"));
    }

    #[test]
    fn a_token_becomes_a_header_and_stays_out_of_errors() {
        let authorization = |token: &str| Options { token: Token::new(token), ..Options::default() }.authorization();
        assert_eq!(authorization(" "), Ok(None));
        assert_eq!(authorization("t\n"), Ok(Some(HeaderValue::from_static("Bearer t"))));
        assert!(authorization("${TOKEN}").unwrap_err().contains("literal ${…}"));
        let error = authorization("canary canary").unwrap_err();
        assert!(error.contains("OPENCLAW_PROXY_OPENCLAW_TOKEN") && !error.contains("canary"));
        assert!(!format!("{:?}", authorization("canary")).contains("canary"));
    }

    #[test]
    fn a_session_is_bound_by_a_plain_id() {
        let flag = |id: &str| Options { session_id: some(id), ..Options::default() }.binding();
        assert_eq!(flag(" s1 "), Ok(HeaderValue::from_static("s1")));
        assert!(Options::default().binding().unwrap_err().contains("--session-id"));
        assert_eq!(flag(""), Options::default().binding());
        assert!(flag("${SESSION_ID}").unwrap_err().contains("literal ${…}"));
        for bad in ["a b", "a,b", "é", "a\u{1}"] {
            assert!(flag(bad).unwrap_err().contains("not usable"), "{bad}");
        }
        for none in ["null", r#""""#, r#"" ""#] {
            assert_eq!(session_of_member(none), None);
        }
        assert_eq!(session_of_member(r#""s\u0031""#), Some(flag("s1")));
        assert!(session_of_member("7").unwrap().unwrap_err().contains("string"));
    }
}
