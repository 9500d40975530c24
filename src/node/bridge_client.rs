//! The app's end of a bridge: registers what a [`Lender`] lends, keeps a socket open, runs the calls that come.
//!
//! One task owns the socket and everything that is not a call; each call has a task of its own, which goes on when
//! the socket goes. What is known of calls lives in [`Calls`]. A session lasts until the proxy forgets it; then
//! another one is registered, with another MCP URL.

pub mod calls;
pub mod frames;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use http::header::{AUTHORIZATION, CONTENT_TYPE, USER_AGENT};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};
use rustls_platform_verifier::BuilderVerifierExt;
use serde_json::json;
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::tungstenite::protocol::WebSocketConfig;
use tokio_tungstenite::tungstenite::{self, Bytes, Message};
use tokio_tungstenite::{Connector, MaybeTlsStream, WebSocketStream};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::backoff::Backoff;
use crate::auth::Token;
use crate::http_client::{self, HttpClient};
use crate::json;
use crate::protocol::Close;
use calls::{Calls, Started};
use frames::{Answer, FromProxy, Invoke, PONG, Progress};

/// How long a request to the proxy, or the opening of a socket, may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(15);
/// How often the proxy is asked whether it is alive.
const PING_INTERVAL: Duration = Duration::from_secs(20);
/// How long the proxy may be silent.
const SILENCE: Duration = Duration::from_secs(50);
/// How long the network may take for one frame, be it a result of megabytes.
const SEND_TIMEOUT: Duration = Duration::from_secs(60);
/// How long to look for the reason when a frame cannot be sent.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long a tool that is cancelled may take to stop, and how long goodbyes may take.
const WIND_DOWN: Duration = Duration::from_secs(5);
/// How much later than the proxy a call's time is over here, so that its caller hears of it from the proxy.
const DEADLINE_SLACK: Duration = Duration::from_secs(1);
/// The most bytes of a frame that the proxy may send; it takes requests of 4 MiB unless it is set otherwise.
const MAX_FRAME_BYTES: usize = 64 * 1024 * 1024;
/// The most bytes of an answer of the proxy's over HTTP.
const MAX_BODY_BYTES: usize = 1024 * 1024;

/// What is lent: tools, and what runs them.
pub trait Lender: Send + Sync + 'static {
    /// The JSON text of a registration's `tools`, an array, as it is now and whenever it changes.
    fn tools(&self) -> watch::Receiver<Arc<str>>;

    /// Runs a tool. When `cancelled` ends, nobody wants the answer any more.
    fn call(
        &self,
        call: ToolCall,
        progress: ProgressSink,
        cancelled: CancellationToken,
    ) -> impl Future<Output = Answer> + Send;
}

/// A call to a [`Lender`]. All but the name is JSON text.
#[derive(Debug, Clone)]
pub struct ToolCall {
    /// The tool's name.
    pub tool: String,
    /// The arguments, an object.
    pub arguments: String,
    /// The request's `_meta`, without MCP's own keys.
    pub meta: Option<String>,
    /// Answers to an earlier `input_required` result.
    pub input_responses: Option<String>,
    /// The state of an earlier `input_required` result.
    pub request_state: Option<String>,
}

/// Where a call tells how far it is.
#[derive(Debug, Clone)]
pub struct ProgressSink {
    calls: Arc<Calls>,
    number: u64,
    is_wanted: bool,
}

impl ProgressSink {
    /// Tells the caller, if it wants to know.
    pub fn report(&self, progress: &Progress) {
        if self.is_wanted {
            self.calls.report(self.number, progress);
        }
    }
}

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

type Socket = WebSocketStream<MaybeTlsStream<TcpStream>>;

/// How a socket ended.
#[derive(Debug)]
enum End {
    Stopped,
    Closed(u16, String),
    Broken(String),
}

/// Why the proxy could not be reached, for now or for good.
enum Failure {
    Passing(String),
    Final(BridgeError),
}

impl From<BridgeError> for Failure {
    fn from(error: BridgeError) -> Self {
        Failure::Final(error)
    }
}

/// The client of one proxy for one lender.
pub struct BridgeClient<L> {
    options: Options,
    lender: Arc<L>,
    http: HttpClient,
    sessions_uri: Uri,
    headers: HeaderMap,
    tasks: TaskTracker,
    told: Mutex<Told>,
}

/// Which tools the proxy knows.
#[derive(Debug, Default)]
struct Told {
    confirmed: Arc<str>,
    sent: Option<Arc<str>>,
}

impl<L: Lender> BridgeClient<L> {
    /// A client that has done nothing yet.
    ///
    /// # Errors
    /// [`BridgeError::Unusable`] if the options cannot be used.
    pub fn new(options: Options, lender: Arc<L>) -> Result<Self, BridgeError> {
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
        Ok(BridgeClient {
            options,
            lender,
            http,
            sessions_uri,
            headers,
            tasks: TaskTracker::new(),
            told: Mutex::default(),
        })
    }

    /// Lends until `stop`, telling `on_session` of each session that is registered.
    ///
    /// # Errors
    /// [`BridgeError`] if it cannot go on.
    pub async fn run(&self, mut on_session: impl FnMut(&Session), stop: &CancellationToken) -> Result<(), BridgeError> {
        let mut backoff = Backoff::default();
        let mut is_replacement = false;
        let ended = loop {
            let session = match stop.run_until_cancelled(self.register(is_replacement)).await {
                None => break Ok(()),
                Some(Ok(session)) => session,
                Some(Err(Failure::Final(error))) => break Err(error),
                Some(Err(Failure::Passing(why))) => {
                    if !wait(&mut backoff, &why, stop).await {
                        break Ok(());
                    }
                    continue;
                }
            };
            is_replacement = true;
            for warning in &session.warnings {
                tracing::warn!("the proxy warns: {warning}");
            }
            on_session(&session);
            let calls = Arc::new(Calls::new(&session.id, self.options.max_calls));
            let ended = self.keep_connected(&session, &calls, &mut backoff, stop).await;
            calls.end();
            match ended {
                Ok(true) => {}
                Ok(false) => {
                    self.unregister(&session).await;
                    break Ok(());
                }
                Err(error) => break Err(error),
            }
        };
        self.tasks.close();
        let _still_running = tokio::time::timeout(WIND_DOWN, self.tasks.wait()).await;
        ended
    }

    /// Keeps a socket open for as long as the session lives: then true; false if it was told to stop.
    async fn keep_connected(
        &self,
        session: &Session,
        calls: &Arc<Calls>,
        backoff: &mut Backoff,
        stop: &CancellationToken,
    ) -> Result<bool, BridgeError> {
        loop {
            let (why, lasted) = match stop.run_until_cancelled(self.connect(session)).await {
                None => return Ok(false),
                Some(Err(Failure::Final(error))) => return Err(error),
                Some(Err(Failure::Passing(why))) => (why, Duration::ZERO),
                Some(Ok(socket)) => {
                    let since = Instant::now();
                    tracing::info!(session.id = short(&session.id), "bridge connected");
                    calls.connected();
                    let end = self.serve(socket, calls, stop).await;
                    calls.disconnected();
                    let why = match end {
                        End::Stopped => return Ok(false),
                        End::Broken(why) => why,
                        End::Closed(code, reason) => {
                            match close_of(code) {
                                Some(Close::Deleted) => return Err(BridgeError::Deleted),
                                Some(Close::Unauthorized) => return Err(BridgeError::Unauthorized),
                                Some(Close::AlreadyConnected) => return Err(BridgeError::Occupied),
                                Some(Close::UnknownSession) => {
                                    tracing::warn!(
                                        session.id = short(&session.id),
                                        "the proxy does not know the session any more; registering again"
                                    );
                                    // Not at once, should the proxy forget every session at once.
                                    let pause = backoff.pause();
                                    return Ok(stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some());
                                }
                                _ => {}
                            }
                            if code == u16::from(tungstenite::protocol::frame::coding::CloseCode::Size) {
                                calls.give_up_largest();
                            }
                            format!("the proxy closed the bridge ({code}): {reason}")
                        }
                    };
                    (why, since.elapsed())
                }
            };
            backoff.worked(lasted);
            if !wait(backoff, &why, stop).await {
                return Ok(false);
            }
        }
    }

    async fn register(&self, is_replacement: bool) -> Result<Session, Failure> {
        let tools = self.lender.tools().borrow().clone();
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
        *self.told() = Told { confirmed: tools.clone(), sent: None };
        Ok(Session { id, mcp_url, bridge_url, warnings, tools, is_replacement })
    }

    /// Says goodbye, so that MCP clients learn at once that the tools are gone.
    async fn unregister(&self, session: &Session) {
        let Ok(uri) = format!("{}/{}", self.sessions_uri, session.id).parse() else { return };
        let goodbye = self.request(Method::DELETE, &uri, String::new());
        let _gone = tokio::time::timeout(WIND_DOWN, goodbye).await;
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

    async fn connect(&self, session: &Session) -> Result<Socket, Failure> {
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

    /// Reads and writes at the same time, for as long as the socket lives.
    async fn serve(&self, socket: Socket, calls: &Arc<Calls>, stop: &CancellationToken) -> End {
        let (mut sink, mut stream) = socket.split();
        let mut tools = self.lender.tools();
        // Whether an update that an earlier socket sent has arrived is not known.
        self.told().sent = None;
        let mut ping = tokio::time::interval(PING_INTERVAL);
        ping.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let write = async {
            loop {
                if let Some(update) = self.update(&mut tools, calls) {
                    calls.send(update);
                }
                let message = tokio::select! {
                    frame = calls.next_frame() => Message::Text(frame),
                    _ = ping.tick() => Message::Ping(Bytes::new()),
                    Ok(()) = tools.changed() => continue,
                };
                match tokio::time::timeout(SEND_TIMEOUT, sink.send(message)).await {
                    Ok(Ok(())) => {}
                    Ok(Err(error)) => return error.to_string(),
                    Err(_) => return "the proxy takes nothing any more".into(),
                }
            }
        };
        let read = async {
            let mut has_greeted = false;
            loop {
                match tokio::time::timeout(SILENCE, stream.next()).await {
                    Ok(Some(Ok(Message::Text(text)))) => self.receive(&text, calls, &mut has_greeted),
                    Ok(Some(Ok(Message::Close(Some(close))))) => {
                        return End::Closed(close.code.into(), close.reason.to_string());
                    }
                    Ok(Some(Ok(Message::Close(None)))) => return End::Closed(1005, "it gives no reason".into()),
                    Ok(Some(Ok(_))) => {}
                    Ok(Some(Err(error))) => return End::Broken(error.to_string()),
                    Ok(None) => return End::Broken("the connection ended".into()),
                    Err(_) => return End::Broken("the proxy has been silent for too long".into()),
                }
            }
        };
        tokio::pin!(read);
        let end = tokio::select! {
            end = &mut read => end,
            // A socket that the proxy has closed takes no frames; why it did stands before the end.
            why = write => tokio::time::timeout(LAST_WORDS, read).await.unwrap_or(End::Broken(why)),
            () = stop.cancelled() => End::Stopped,
        };
        if matches!(end, End::Stopped) {
            let _gone = tokio::time::timeout(LAST_WORDS, sink.close()).await;
        }
        end
    }

    /// The frame that tells the proxy of tools that it does not know yet.
    fn update(&self, tools: &mut watch::Receiver<Arc<str>>, calls: &Calls) -> Option<String> {
        let current = tools.borrow_and_update().clone();
        let mut told = self.told();
        if *told.sent.as_ref().unwrap_or(&told.confirmed) == current {
            return None;
        }
        told.sent = Some(current.clone());
        Some(frames::update_tools(calls.session(), &current))
    }

    fn receive(&self, text: &str, calls: &Arc<Calls>, has_greeted: &mut bool) {
        match FromProxy::parse(text) {
            Ok(FromProxy::Ping) => calls.send(PONG.into()),
            Ok(FromProxy::Hello { pending }) => {
                *has_greeted = true;
                calls.hello(&pending);
            }
            Ok(FromProxy::Invoke(invoke)) => {
                if !std::mem::replace(has_greeted, true) {
                    // A proxy that does not greet does not resume either.
                    calls.hello(&[]);
                }
                if let Some(started) = calls.start(&invoke, Instant::now()) {
                    self.spawn_call(&invoke, started, calls);
                }
            }
            Ok(FromProxy::Cancel { request_id, reason }) => {
                tracing::debug!(request.id = %request_id, %reason, "call cancelled");
                calls.cancel(&request_id);
            }
            Ok(FromProxy::ToolsUpdated) => {
                let mut told = self.told();
                if let Some(sent) = told.sent.take() {
                    told.confirmed = sent;
                }
                tracing::info!("the proxy has taken the changed tools");
            }
            Ok(FromProxy::Error(message)) => tracing::warn!("the proxy says: {message}"),
            Ok(FromProxy::Other) => {}
            Err(why) => tracing::warn!("{why}"),
        }
    }

    fn spawn_call(&self, invoke: &Invoke<'_>, started: Started, calls: &Arc<Calls>) {
        let own = |text: Option<&str>| text.map(str::to_owned);
        let call = ToolCall {
            tool: invoke.tool.clone().into_owned(),
            arguments: invoke.arguments.to_owned(),
            meta: own(invoke.meta),
            input_responses: own(invoke.input_responses),
            request_state: own(invoke.request_state),
        };
        let progress = ProgressSink { calls: Arc::clone(calls), number: started.number, is_wanted: invoke.progress };
        let running = Running { calls: Arc::clone(calls), number: started.number };
        let lender = Arc::clone(&self.lender);
        self.tasks.spawn(async move {
            let since = Instant::now();
            let tool = call.tool.clone();
            let answer = run_call(&*lender, call, progress, &started).await;
            let duration_ms = since.elapsed().as_millis() as u64;
            tracing::debug!(tool.name = tool, call = started.number, duration_ms, "call ended");
            running.calls.finish(running.number, &answer, Instant::now());
        });
    }

    fn told(&self) -> std::sync::MutexGuard<'_, Told> {
        self.told.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A call that has no answer yet. If its task ends without one, because the tool panicked, the caller hears of it.
struct Running {
    calls: Arc<Calls>,
    number: u64,
}

impl Drop for Running {
    fn drop(&mut self) {
        // Does nothing if the call is finished.
        self.calls.finish(self.number, &Answer::Failed("The tool crashed.".into()), Instant::now());
    }
}

async fn run_call<L: Lender>(lender: &L, call: ToolCall, progress: ProgressSink, started: &Started) -> Answer {
    let give_up = started.cancelled.child_token();
    let time_is_over = async {
        match started.deadline {
            Some(deadline) => tokio::time::sleep_until((deadline + DEADLINE_SLACK).into()).await,
            None => std::future::pending().await,
        }
    };
    let work = lender.call(call, progress, give_up.clone());
    tokio::pin!(work);
    tokio::select! {
        answer = &mut work => return answer,
        () = started.cancelled.cancelled() => {}
        () = time_is_over => give_up.cancel(),
    }
    let _late = tokio::time::timeout(WIND_DOWN, work).await;
    Answer::Failed("The tool did not answer in time.".into())
}

/// Waits before the next attempt; false if it was told to stop.
async fn wait(backoff: &mut Backoff, why: &str, stop: &CancellationToken) -> bool {
    let pause = backoff.pause();
    tracing::warn!(pause_ms = pause.as_millis() as u64, "{why}; trying again");
    stop.run_until_cancelled(tokio::time::sleep(pause)).await.is_some()
}

fn tls_connector() -> Result<Connector, rustls::Error> {
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()?
        .with_platform_verifier()?
        .with_no_client_auth();
    Ok(Connector::Rustls(Arc::new(config)))
}

/// What a close code means for an app; `None` for those after which it simply comes back.
fn close_of(code: u16) -> Option<Close> {
    [Close::Deleted, Close::Unauthorized, Close::UnknownSession, Close::AlreadyConnected]
        .into_iter()
        .find(|close| close.code() == code)
}

/// Enough of a session's id to follow it through a log, too little to use it.
fn short(id: &str) -> &str {
    id.get(..8).unwrap_or(id)
}
