//! The proxy as an app reaches it: sessions over HTTP, and the sockets of their bridges.

use std::sync::Arc;
use std::time::Duration;

use http::header::{AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use rustls_platform_verifier::BuilderVerifierExt;
use serde_json::json;
use tokio::net::TcpStream;
use tokio_tungstenite::tungstenite;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::{Connector, MaybeTlsStream, WebSocketStream};

use crate::auth::Token;
use crate::http_client::{self, HttpClient};
use crate::json;

/// How long a request to the proxy, or the opening of a socket, may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// How long saying goodbye may take.
const GOODBYE_TIMEOUT: Duration = Duration::from_secs(5);
/// The most bytes of a frame that the proxy may send; it takes requests of 4 MiB unless it is set otherwise.
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;
/// The most bytes of an answer of the proxy's over HTTP.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// Where the proxy is, and what it is told of the app.
#[derive(Debug, Clone)]
pub struct Options {
    /// The proxy's base URL.
    pub proxy_url: String,
    /// The proxy's token for apps.
    pub token: Token,
    /// How the proxy knows the device.
    pub device_id: String,
    /// How people know it.
    pub device_name: Option<String>,
    /// What a model should know of the tools.
    pub instructions: Option<String>,
    /// The most calls that run at once.
    pub max_calls: usize,
}

/// A session as the proxy has registered it.
#[derive(Debug, Clone)]
pub struct Session {
    /// Its id.
    pub id: String,
    /// Where MCP clients find the tools.
    pub mcp_url: String,
    /// Where the socket connects.
    pub bridge_url: String,
    /// What the proxy finds odd in the tools.
    pub warnings: Vec<String>,
    /// The tools' text, as it was registered.
    pub tools: Arc<str>,
    /// An earlier session has ended, so the MCP URL is another one now.
    pub is_replacement: bool,
}

/// Why lending has ended for good.
#[derive(Debug, thiserror::Error)]
pub enum BridgeError {
    /// The proxy's URL, or its token, cannot be used.
    #[error("{0}")]
    Unusable(String),
    /// The proxy does not let this app in.
    #[error("The proxy refuses the app token. Set OPENCLAW_PROXY_APP_TOKEN to the token that the proxy has for apps.")]
    Unauthorized,
    /// The proxy does not take the registration.
    #[error("The proxy refuses to register the tools (HTTP {status}): {detail}")]
    Refused {
        /// The HTTP status.
        status: StatusCode,
        /// What the proxy says.
        detail: String,
    },
    /// Somebody deleted the session.
    #[error("The session was deleted, so its tools are not lent any more.")]
    Deleted,
    /// Another app is connected with the same session.
    #[error("Another bridge of the same session is connected to the proxy, so this one ends.")]
    Occupied,
}

impl BridgeError {
    /// Whether something is wrong with the settings, so that trying again does not help.
    pub fn is_config(&self) -> bool {
        matches!(self, BridgeError::Unusable(_) | BridgeError::Unauthorized | BridgeError::Refused { .. })
    }
}

pub(super) type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// Why the proxy could not be reached, for now or for good.
pub(super) enum Failure {
    Passing(String),
    Final(BridgeError),
}

impl From<BridgeError> for Failure {
    fn from(error: BridgeError) -> Self {
        Failure::Final(error)
    }
}

/// A proxy.
pub(super) struct Proxy {
    options: Options,
    http: HttpClient,
    sessions_uri: Uri,
    headers: HeaderMap,
}

impl Proxy {
    /// A proxy that has not been spoken to yet.
    ///
    /// # Errors
    /// [`BridgeError::Unusable`] if the options cannot be used.
    pub(super) fn new(options: Options) -> Result<Self, BridgeError> {
        let base = options.proxy_url.trim().trim_end_matches('/');
        let uri = format!("{base}/v1/chat/sessions").parse::<Uri>().ok();
        let is_usable = |uri: &Uri| {
            matches!(uri.scheme_str(), Some("http" | "https"))
                && uri.authority().is_some_and(|a| !a.host().is_empty() && !a.as_str().contains('@'))
        };
        let sessions_uri = uri.filter(|uri| is_usable(uri) && !base.contains("/v1/")).ok_or_else(|| {
            BridgeError::Unusable(
                "The proxy's URL is not usable: it must be http://host[:port] or https://host[:port].".into(),
            )
        })?;
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.insert(USER_AGENT, HeaderValue::from_static(concat!("openclaw-node/", env!("CARGO_PKG_VERSION"))));
        let token = options.token.expose().trim();
        if !token.is_empty() {
            let is_usable = token.bytes().all(|byte| byte.is_ascii_graphic()) && !token.contains("${");
            let value = HeaderValue::try_from(format!("Bearer {token}")).ok().filter(|_| is_usable);
            let mut value = value.ok_or_else(|| {
                BridgeError::Unusable(
                    "The app token is not usable: OPENCLAW_PROXY_APP_TOKEN must consist of visible ASCII characters."
                        .into(),
                )
            })?;
            value.set_sensitive(true);
            headers.insert(AUTHORIZATION, value);
        }
        let http = HttpClient::new(&sessions_uri).map_err(BridgeError::Unusable)?;

        Ok(Proxy { options, http, sessions_uri, headers })
    }

    /// The most calls that run at once.
    pub(super) fn max_calls(&self) -> usize {
        self.options.max_calls
    }

    /// Registers these tools, and gets a session.
    pub(super) async fn register(&self, tools: Arc<str>, is_replacement: bool) -> Result<Session, Failure> {
        let options = &self.options;
        let mut body = json!({
            "device_id": options.device_id,
            "app_version": env!("CARGO_PKG_VERSION"),
            "bridge_features": ["resume", "cancel", "deadline", "progress", "tools", "context"],
        });
        if let Some(name) = &options.device_name {
            body["device_name"] = name.as_str().into();
        }
        if let Some(instructions) = &options.instructions {
            body["instructions"] = instructions.as_str().into();
        }
        // The tools' text is put in as it is.
        let mut body = body.to_string();
        body.pop();
        body.push_str(&format!(r#","tools":{tools}}}"#));
        let (status, text) = self.request(Method::POST, &self.sessions_uri, body).await?;
        if status == StatusCode::UNAUTHORIZED {
            return Err(BridgeError::Unauthorized.into());
        }
        let string = |name: &str| json::member(&text, name).and_then(json::as_string).map(String::from);
        if !status.is_success() {
            let detail = string("detail").unwrap_or_else(|| "it gives no reason; is this the proxy's URL?".into());
            let may_pass = status.is_server_error()
                || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::REQUEST_TIMEOUT);
            return Err(if may_pass {
                Failure::Passing(format!("the proxy cannot register the tools now (HTTP {status}): {detail}"))
            } else {
                BridgeError::Refused { status, detail }.into()
            });
        }
        let (Some(id), Some(mcp_url), Some(bridge_url)) =
            (string("mcpSessionId"), string("mcp_url"), string("bridge_url"))
        else {
            return Err(BridgeError::Unusable(
                "What answers at the proxy's URL is no OpenClaw MCP Proxy: the registration's answer has no mcp_url and bridge_url."
                    .into(),
            )
            .into());
        };
        let mut warnings = Vec::new();
        if let Some(texts) = json::member(&text, "warnings") {
            let _checked = json::elements(texts, json::MAX_DEPTH, |text| {
                warnings.extend(json::as_string(text).map(String::from));
            });
        }
        Ok(Session { id, mcp_url, bridge_url, warnings, tools, is_replacement })
    }

    /// Says goodbye, so that MCP clients learn at once that the tools are gone.
    pub(super) async fn unregister(&self, session: &Session) {
        let Ok(uri) = format!("{}/{}", self.sessions_uri, session.id).parse() else { return };
        let goodbye = self.request(Method::DELETE, &uri, String::new());
        let _gone = tokio::time::timeout(GOODBYE_TIMEOUT, goodbye).await;
    }

    async fn request(&self, method: Method, uri: &Uri, body: String) -> Result<(StatusCode, String), Failure> {
        let origin = uri.authority().map_or("", |authority| authority.as_str());
        let exchange = async {
            let response = self.http.send(method, uri, &self.headers, body.into(), Duration::ZERO).await?;
            let status = response.status();
            Ok((status, http_client::read(response.into_body(), MAX_BODY_BYTES).await?))
        };
        match tokio::time::timeout(CONNECT_TIMEOUT, exchange).await {
            Ok(Ok((status, body))) => Ok((status, String::from_utf8_lossy(&body).into_owned())),
            Ok(Err(http_client::HttpError::Unreachable(why))) => {
                Err(Failure::Passing(format!("the proxy at {origin} cannot be reached: {why}")))
            }
            Ok(Err(error)) => Err(Failure::Passing(format!("the proxy at {origin} {error}"))),
            Err(_) => Err(Failure::Passing(format!("the proxy at {origin} does not answer"))),
        }
    }

    /// Opens the socket of a session.
    pub(super) async fn connect(&self, session: &Session) -> Result<Socket, Failure> {
        let is_tls = session.bridge_url.starts_with("wss://");
        if !is_tls && self.sessions_uri.scheme_str() == Some("https") {
            return Err(BridgeError::Unusable(
                "The proxy gave a bridge URL without TLS, though it is reached by https. Set OPENCLAW_PROXY_PUBLIC_URL where the proxy runs."
                    .into(),
            )
            .into());
        }
        let unusable = |what: &dyn std::fmt::Display| {
            Failure::Final(BridgeError::Unusable(format!("The proxy's bridge URL cannot be used: {what}.")))
        };
        let mut request = session.bridge_url.as_str().into_client_request().map_err(|error| unusable(&error))?;
        for name in [AUTHORIZATION, USER_AGENT] {
            if let Some(value) = self.headers.get(&name) {
                request.headers_mut().insert(name, value.clone());
            }
        }
        let connector = if is_tls { tls_connector().map_err(|error| unusable(&error))? } else { Connector::Plain };
        let config =
            WebSocketConfig::default().max_message_size(Some(MAX_FRAME_BYTES)).max_frame_size(Some(MAX_FRAME_BYTES));
        let opening = tokio_tungstenite::connect_async_tls_with_config(request, Some(config), true, Some(connector));
        match tokio::time::timeout(CONNECT_TIMEOUT, opening).await {
            Ok(Ok((socket, _))) => Ok(socket),
            Ok(Err(tungstenite::Error::Http(response))) if response.status() == StatusCode::UNAUTHORIZED => {
                Err(BridgeError::Unauthorized.into())
            }
            Ok(Err(tungstenite::Error::Http(response))) => {
                Err(Failure::Passing(format!("the bridge cannot be opened: HTTP {}", response.status())))
            }
            Ok(Err(error)) => Err(Failure::Passing(format!("the bridge cannot be opened: {error}"))),
            Err(_) => Err(Failure::Passing("the bridge cannot be opened: the proxy does not answer".into())),
        }
    }
}

fn tls_connector() -> Result<Connector, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_platform_verifier()?
        .with_no_client_auth();
    Ok(Connector::Rustls(Arc::new(config)))
}
