//! The way to a deployment: a connection of its own for each request, and nothing that hides what comes back. What a
//! common client smooths over (a header given twice, a redirect, the answer to an upgrade) is what is looked for.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    AUTHORIZATION, CONNECTION, CONTENT_TYPE, HOST, HeaderName, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY,
    SEC_WEBSOCKET_VERSION, UPGRADE, USER_AGENT,
};
use http::{HeaderMap, Method, Request, Response, StatusCode, Version, request};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_tungstenite::tungstenite::handshake::client::generate_key;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocketConfig};
use tokio_tungstenite::{MaybeTlsStream, WebSocketStream};
use tokio_util::task::AbortOnDropHandle;
use url::{Host, Url};

use crate::auth::Token;

/// How long a connection, and its TLS, may each take.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// How long a request may take that asks for nothing that takes time.
pub(super) const ANSWER_TIMEOUT: Duration = Duration::from_secs(15);
/// The most bytes of an answer, or of a frame.
const MAX_BYTES: usize = 64 * 1024 * 1024;

/// The public base URL of a deployment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    url: Url,
}

impl Base {
    /// Reads `http(s)://host[:port][/prefix]`.
    ///
    /// # Errors
    /// A sentence, if it is anything else.
    pub fn parse(text: &str) -> Result<Self, String> {
        let refuse = || {
            "The URL is not usable: it must be http(s)://host[:port][/prefix], without /v1, as in https://mcp.example.com."
                .to_owned()
        };
        let mut url = Url::parse(text.trim()).map_err(|_| refuse())?;
        let is_base = matches!(url.scheme(), "http" | "https")
            && url.has_host()
            && url.username().is_empty()
            && url.password().is_none()
            && url.query().is_none()
            && url.fragment().is_none()
            && !url.path().split('/').any(|segment| segment == "v1");
        if !is_base {
            return Err(refuse());
        }
        let prefix = url.path().trim_end_matches('/').to_owned();
        url.set_path(&prefix);
        Ok(Base { url })
    }

    /// Whether it is reached by TLS.
    pub fn is_tls(&self) -> bool {
        self.url.scheme() == "https"
    }

    /// The name or address, without brackets.
    pub fn host(&self) -> String {
        match self.url.host() {
            Some(Host::Ipv6(address)) => address.to_string(),
            Some(host) => host.to_string(),
            None => String::new(),
        }
    }

    /// The port.
    pub fn port(&self) -> u16 {
        self.url.port_or_known_default().unwrap_or(80)
    }

    /// Whether nobody else than this machine gets there.
    pub fn is_loopback(&self) -> bool {
        match self.url.host() {
            Some(Host::Domain(name)) => name.eq_ignore_ascii_case("localhost"),
            Some(Host::Ipv4(address)) => address.is_loopback(),
            Some(Host::Ipv6(address)) => address.is_loopback(),
            None => false,
        }
    }

    /// `host[:port]`, as in `Host`.
    pub fn authority(&self) -> &str {
        self.url.authority()
    }

    /// What stands before `/v1`, without a slash at its end.
    pub fn prefix(&self) -> &str {
        self.url.path().trim_end_matches('/')
    }

    /// The whole URL of a path; `scheme` is `http` or `ws`, and gets its `s` where this has one.
    pub fn url(&self, scheme: &str, path: &str) -> String {
        let tls = if self.is_tls() { "s" } else { "" };
        format!("{scheme}{tls}://{}{}{path}", self.authority(), self.prefix())
    }
}

impl std::fmt::Display for Base {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.url("http", ""))
    }
}

/// Why there is no answer, or no whole one.
#[derive(Debug, thiserror::Error)]
pub(super) enum WireError {
    #[error("no connection is made: {0}")]
    Unreachable(String),
    #[error("TLS fails: {0}")]
    Tls(std::io::Error),
    #[error("the connection ends before there is a whole answer ({0})")]
    Broken(String),
    #[error("there is no whole answer within {0:?}")]
    Slow(Duration),
}

fn broken(error: &(dyn std::error::Error + 'static)) -> WireError {
    let mut root = error;
    while let Some(source) = root.source() {
        root = source;
    }
    WireError::Broken(root.to_string())
}

/// An answer with all of its body.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) version: Version,
    pub(super) headers: HeaderMap,
    pub(super) body: Bytes,
}

impl Answer {
    pub(super) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    pub(super) fn header(&self, name: impl http::header::AsHeaderName) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }
}

/// An answer that has begun. Dropped, its connection is closed.
#[derive(Debug)]
pub(super) struct Begun {
    pub(super) response: Response<Incoming>,
    _connection: AbortOnDropHandle<()>,
}

impl Begun {
    pub(super) async fn finish(self) -> Result<Answer, WireError> {
        let (head, body) = self.response.into_parts();
        let body = Limited::new(body, MAX_BYTES).collect().await.map_err(|error| broken(&*error))?.to_bytes();
        Ok(Answer { status: head.status, version: head.version, headers: head.headers, body })
    }
}

pub(super) type Socket = WebSocketStream<TokioIo<Upgraded>>;

/// What became of an upgrade.
pub(super) enum Upgrade {
    Done(Box<Socket>),
    /// 101, with a key that does not fit: somebody on the way answers upgrades on his own.
    Forged,
    Refused(Answer),
}

/// Where the deployment is, and how to get there.
pub(super) struct Wire {
    pub(super) base: Base,
    pub(super) address: SocketAddr,
    pub(super) tls: Option<Arc<rustls::ClientConfig>>,
}

pub(super) type Body = Full<Bytes>;

impl Wire {
    /// A TLS session on a new connection.
    pub(super) async fn handshake(
        &self,
        config: &Arc<rustls::ClientConfig>,
    ) -> Result<TlsStream<TcpStream>, WireError> {
        let stream = self.dial(self.address).await?;
        let name =
            ServerName::try_from(self.base.host()).map_err(|error| WireError::Tls(std::io::Error::other(error)))?;
        let handshake = TlsConnector::from(Arc::clone(config)).connect(name, stream);
        match tokio::time::timeout(CONNECT_TIMEOUT, handshake).await {
            Ok(stream) => stream.map_err(WireError::Tls),
            Err(_) => Err(WireError::Slow(CONNECT_TIMEOUT)),
        }
    }

    async fn dial(&self, address: SocketAddr) -> Result<TcpStream, WireError> {
        match tokio::time::timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err(error)) => Err(WireError::Unreachable(error.to_string())),
            Err(_) => Err(WireError::Slow(CONNECT_TIMEOUT)),
        }
    }

    /// A request to a path below the base, without a body yet.
    pub(super) fn request(&self, method: Method, path: &str, token: &Token) -> request::Builder {
        let request = Request::builder()
            .method(method)
            .uri(format!("{}{path}", self.base.prefix()))
            .header(HOST, self.base.authority())
            .header(USER_AGENT, concat!("openclaw-mcp-proxy-doctor/", env!("CARGO_PKG_VERSION")));
        if token.is_empty() { request } else { request.header(AUTHORIZATION, format!("Bearer {}", token.expose())) }
    }

    /// A POST of JSON.
    pub(super) fn post(&self, path: &str, token: &Token) -> request::Builder {
        self.request(Method::POST, path, token).header(CONTENT_TYPE, "application/json")
    }

    /// Sends a request on a connection of its own and waits for the head of its answer, however long it takes.
    pub(super) async fn begin(&self, request: request::Builder, body: impl Into<Bytes>) -> Result<Begun, WireError> {
        let request = request.body(Body::new(body.into())).map_err(|error| WireError::Broken(error.to_string()))?;
        let stream = match &self.tls {
            Some(config) => MaybeTlsStream::Rustls(self.handshake(config).await?),
            None => MaybeTlsStream::Plain(self.dial(self.address).await?),
        };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(|error| broken(&error))?;
        let connection = tokio::spawn(async move {
            // What went wrong, the request says.
            let _ended = connection.with_upgrades().await;
        });
        let connection = AbortOnDropHandle::new(connection);
        let response = sender.send_request(request).await.map_err(|error| broken(&error))?;
        Ok(Begun { response, _connection: connection })
    }

    /// Sends a request and gets the whole answer.
    pub(super) async fn send(&self, request: request::Builder, body: impl Into<Bytes>) -> Result<Answer, WireError> {
        within(ANSWER_TIMEOUT, async { self.begin(request, body).await?.finish().await }).await
    }

    /// Opens a WebSocket.
    pub(super) async fn upgrade(
        &self,
        path: &str,
        token: &Token,
        headers: &[(HeaderName, String)],
    ) -> Result<Upgrade, WireError> {
        let key = generate_key();
        let mut request = self
            .request(Method::GET, path, token)
            .header(CONNECTION, "Upgrade")
            .header(UPGRADE, "websocket")
            .header(SEC_WEBSOCKET_VERSION, "13")
            .header(SEC_WEBSOCKET_KEY, &key);
        for (name, value) in headers {
            request = request.header(name, value);
        }
        within(ANSWER_TIMEOUT, async {
            let begun = self.begin(request, Bytes::new()).await?;
            if begun.response.status() != StatusCode::SWITCHING_PROTOCOLS {
                return begun.finish().await.map(Upgrade::Refused);
            }
            let accept = begun.response.headers().get(SEC_WEBSOCKET_ACCEPT);
            if accept.is_none_or(|accept| accept.as_bytes() != derive_accept_key(key.as_bytes()).as_bytes()) {
                return Ok(Upgrade::Forged);
            }
            let upgraded = hyper::upgrade::on(begun.response).await.map_err(|error| broken(&error))?;
            let config = WebSocketConfig::default().max_message_size(Some(MAX_BYTES)).max_frame_size(Some(MAX_BYTES));
            let socket = WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Client, Some(config)).await;
            Ok(Upgrade::Done(Box::new(socket)))
        })
        .await
    }
}

/// Ends what takes too long.
pub(super) async fn within<T>(
    limit: Duration,
    work: impl Future<Output = Result<T, WireError>>,
) -> Result<T, WireError> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(WireError::Slow(limit)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_url_is_a_scheme_a_host_and_perhaps_a_port_and_a_prefix() {
        let base = Base::parse("https://Mcp.Example:8443/a/b/").unwrap();
        assert_eq!((base.authority(), base.prefix(), base.port()), ("mcp.example:8443", "/a/b", 8443));
        assert_eq!(base.url("ws", "/v1/x"), "wss://mcp.example:8443/a/b/v1/x");
        let plain = Base::parse("http://[::1]:8000").unwrap();
        assert_eq!((plain.host(), plain.to_string()), ("::1".to_owned(), "http://[::1]:8000".to_owned()));
        assert!(plain.is_loopback() && !base.is_loopback());
        for bad in ["", "mcp.example", "ftp://x", "https://u:p@x", "https://x/?q", "https://x/v1/mcp/id", "https://"] {
            assert!(Base::parse(bad).is_err(), "{bad}");
        }
    }
}
