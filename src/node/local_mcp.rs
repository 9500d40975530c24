//! The local MCP server: the node's capabilities for clients on this machine, at `http://127.0.0.1:8765/`.
//!
//! Loopback is not enough, since every web page that a user opens can reach it, too. So a request passes one gate
//! after the other before its body is looked at, and each gate has its own status and a short text:
//!
//! | gate | refusal |
//! |---|---|
//! | the peer is on this machine | 403 |
//! | one of the few places is free, or becomes so within 50 ms | 503 |
//! | no `Origin` and no `Referer`: only browsers send them | 403 |
//! | `Host` is 127.0.0.1, localhost or `[::1]` (DNS rebinding) | 403 |
//! | the bearer token, if there is one | 401 |
//! | GET is answered with a line of text, POST goes on | 405 |
//! | `application/json`: a page cannot send it without asking | 415 |
//! | the body is not too large | 413 |
//!
//! `Sec-Fetch-*` says nothing here: clients that run on Node send it. Any path is served. No header of CORS is ever
//! sent, so that no page is ever let in. Each request runs in a task of its own, which outlives its connection only
//! if it wants no answer. [`dispatch`] does what a message asks for.

pub mod calls;
pub mod dispatch;
pub mod message;
mod modern;

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::pin::pin;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{AUTHORIZATION, CONTENT_LENGTH, CONTENT_TYPE, HOST, ORIGIN, REFERER};
use http::request::Parts;
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::{Guard, Token};
use crate::node::capabilities::Registry;
use crate::node::token;
use dispatch::{Dispatcher, Ends};

/// The port that clients expect.
pub const DEFAULT_PORT: u16 = 8765;
/// How long to wait when no connection can be accepted.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often it is logged that connections are refused.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);
/// Connections at once. A client keeps a few; more would only hold file descriptors.
const MAX_CONNECTIONS: usize = 256;
/// How much of a body that is refused is still read, so that its sender gets to read why.
const MAX_DISCARDED_BYTES: usize = 4 * 4 * 1024 * 1024;
/// How long that may take.
const DISCARD_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a sender may pause meanwhile. One that waits for an answer first will send no more.
const DISCARD_PAUSE: Duration = Duration::from_millis(200);

/// What a server is told when it is made.
#[derive(Debug, Clone)]
pub struct Config {
    /// The name by which clients know it.
    pub name: String,
    /// Its version.
    pub version: String,
    /// What clients must present; nothing, if it is empty.
    pub token: Token,
    /// The file that the token is from. When it changes, its token is the one, from the next request on.
    pub token_file: Option<PathBuf>,
    /// Requests that are worked on at once.
    pub max_requests: usize,
    /// How long a request waits for one of these places.
    pub admission: Duration,
    /// How long a request may take, from its head to its answer.
    pub deadline: Duration,
    /// How long a request's head may take: a connection that says nothing takes one of few places.
    pub head_timeout: Duration,
    /// How long a body may pause.
    pub body_pause: Duration,
    /// The largest body.
    pub max_body_bytes: usize,
    /// How long requests may take to end at shutdown, once they have been told to.
    pub drain: Duration,
}

impl Default for Config {
    fn default() -> Self {
        Config {
            name: "openclaw-node".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            token: Token::default(),
            token_file: None,
            max_requests: 8,
            admission: Duration::from_millis(50),
            deadline: Duration::from_secs(6 * 60),
            head_timeout: Duration::from_secs(5),
            body_pause: Duration::from_secs(15),
            max_body_bytes: 4 * 1024 * 1024,
            drain: Duration::from_secs(5),
        }
    }
}

/// The local MCP server.
#[derive(Debug, Clone)]
pub struct Server {
    shared: Arc<Shared>,
}

/// What all requests share.
#[derive(Debug)]
struct Shared {
    config: Config,
    guard: RwLock<Guard>,
    token_file: Option<token::Watched>,
    places: Arc<Semaphore>,
    dispatcher: Arc<Dispatcher>,
    /// Connections, requests and commands: whatever must end before the server has.
    tasks: TaskTracker,
}

/// A refusal: its status, and its text.
type Refusal = (StatusCode, &'static str);

impl Server {
    /// A server of what the registry holds at each request.
    pub fn new(config: Config, registry: Arc<Registry>) -> Self {
        let tasks = TaskTracker::new();
        let dispatcher = Dispatcher::new(registry, &config.name, &config.version, tasks.clone());
        let shared = Shared {
            guard: RwLock::new(Guard::new(&config.token)),
            token_file: config.token_file.clone().map(token::Watched::new),
            places: Arc::new(Semaphore::new(config.max_requests)),
            dispatcher: Arc::new(dispatcher),
            tasks,
            config,
        };
        Server { shared: Arc::new(shared) }
    }

    /// A listener on loopback, and nowhere else.
    ///
    /// # Errors
    /// If the port is taken.
    pub async fn bind(port: u16) -> io::Result<TcpListener> {
        TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await
    }

    /// Puts another token in place; the old one fails from the next request on.
    pub fn set_token(&self, token: &Token) {
        self.shared.set_token(token);
    }

    /// Serves until `shutdown`, which ends what is in flight, and then until that has ended or its time is over.
    pub async fn listen(&self, listener: TcpListener, shutdown: CancellationToken) {
        let shared = &self.shared;
        let permits = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let mut complained = None;
        while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
            match (accepted, Arc::clone(&permits).try_acquire_owned()) {
                (Ok((stream, peer)), Ok(permit)) => {
                    let _delayed = stream.set_nodelay(true);
                    shared.tasks.spawn(serve(Arc::clone(shared), stream, peer, permit, shutdown.clone()));
                }
                (Ok(_), Err(_)) => {
                    if complained.is_none_or(|at: Instant| at.elapsed() >= COMPLAINT_INTERVAL) {
                        complained = Some(Instant::now());
                        tracing::warn!(limit = MAX_CONNECTIONS, "too many local connections");
                    }
                }
                (Err(error), _) => {
                    tracing::warn!(%error, "cannot accept local connections");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
        drop(listener);
        shared.tasks.close();
        if tokio::time::timeout(shared.config.drain, shared.tasks.wait()).await.is_err() {
            tracing::warn!(open = shared.tasks.len(), "local requests did not end in time");
        }
    }
}

/// Serves one connection.
async fn serve(
    shared: Arc<Shared>,
    stream: TcpStream,
    peer: SocketAddr,
    _permit: OwnedSemaphorePermit,
    shutdown: CancellationToken,
) {
    let stopping = shutdown.clone();
    let head_timeout = shared.config.head_timeout;
    let service = service_fn(move |request| {
        let client_gone = CancellationToken::new();
        let handled = handle(Arc::clone(&shared), request, peer, stopping.clone(), client_gone.clone());
        let handled = shared.tasks.spawn(handled);
        // hyper drops this future when the client has gone.
        let guard = client_gone.drop_guard();
        async move {
            let response = handled.await;
            guard.disarm();
            response.unwrap_or_else(|_| Ok(text(StatusCode::INTERNAL_SERVER_ERROR, dispatch::INTERNAL_ERROR_TEXT)))
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(head_timeout)
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    let result = tokio::select! {
        result = connection.as_mut() => result,
        () = shutdown.cancelled() => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        tracing::debug!(%error, "local connection ended");
    }
}

/// Answers one request. An error closes the connection: the server is shutting down.
async fn handle(
    shared: Arc<Shared>,
    request: Request<Incoming>,
    peer: SocketAddr,
    shutdown: CancellationToken,
    client_gone: CancellationToken,
) -> io::Result<Response<Full<Bytes>>> {
    let (head, mut body) = request.into_parts();
    if !peer.ip().to_canonical().is_loopback() {
        return Ok(text(StatusCode::FORBIDDEN, "loopback only"));
    }
    let place = tokio::time::timeout(shared.config.admission, shared.places.acquire());
    let place = match shutdown.run_until_cancelled(place).await {
        Some(Ok(place)) => place.map_err(io::Error::other)?,
        Some(Err(_)) => return Ok(text(StatusCode::SERVICE_UNAVAILABLE, "server busy")),
        None => return Err(shutting_down()),
    };
    // The place may be one that the shutdown has just emptied.
    if shutdown.is_cancelled() {
        return Err(shutting_down());
    }
    let transport = shutdown.child_token();
    let ends = Ends { transport: transport.clone(), client_gone };
    let answered = {
        let mut answered = pin!(shared.answer(&head, &mut body, &ends));
        tokio::select! {
            answered = answered.as_mut() => answered,
            () = tokio::time::sleep(shared.config.deadline) => {
                transport.cancel();
                answered.await
            }
        }
    };
    // Reading the rest of a refused body keeps nobody else waiting.
    drop(place);
    Ok(match answered {
        Ok(response) => response,
        Err((status, why)) => {
            tracing::debug!(status = status.as_u16(), why, "local request refused");
            let discarded = tokio::time::timeout(DISCARD_TIMEOUT, discard(&mut body));
            // Whether it was read to its end or not, the answer is the same.
            let _discarded = shutdown.run_until_cancelled(discarded).await;
            text(status, why)
        }
    })
}

impl Shared {
    fn set_token(&self, token: &Token) {
        *self.guard.write().unwrap_or_else(PoisonError::into_inner) = Guard::new(token);
    }

    async fn answer(&self, head: &Parts, body: &mut Incoming, ends: &Ends) -> Result<Response<Full<Bytes>>, Refusal> {
        self.check(&head.headers)?;
        match head.method {
            Method::GET => Ok(text(StatusCode::OK, &probe(&head.headers))),
            Method::POST => {
                self.check_body(&head.headers)?;
                self.post(&head.headers, body, ends).await
            }
            _ => Err((StatusCode::METHOD_NOT_ALLOWED, "POST only")),
        }
    }

    /// The gates that every method passes.
    fn check(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let is_given = |name: HeaderName| headers.get_all(name).iter().any(|value| !value.is_empty());
        if is_given(ORIGIN) {
            return Err((StatusCode::FORBIDDEN, "origin not allowed"));
        }
        if is_given(REFERER) {
            return Err((StatusCode::FORBIDDEN, "browser context not allowed"));
        }
        if !single(headers, HOST).is_some_and(is_local_host) {
            return Err((StatusCode::FORBIDDEN, "host not allowed"));
        }
        if let Some(token) = self.token_file.as_ref().and_then(token::Watched::changed) {
            self.set_token(&token);
        }
        // Cloned, so that one request never sees two tokens.
        let guard = self.guard.read().unwrap_or_else(PoisonError::into_inner).clone();
        let is_doubled = headers.get_all(AUTHORIZATION).iter().count() > 1;
        if guard.check(headers).is_err() || (is_doubled && !guard.is_open()) {
            return Err((StatusCode::UNAUTHORIZED, "missing or invalid bearer token"));
        }
        Ok(())
    }

    /// What is known of a body before it is read.
    fn check_body(&self, headers: &HeaderMap) -> Result<(), Refusal> {
        let media_type = single(headers, CONTENT_TYPE).unwrap_or_default().split(';').next().unwrap_or_default();
        if !media_type.trim().eq_ignore_ascii_case("application/json") {
            return Err((StatusCode::UNSUPPORTED_MEDIA_TYPE, "application/json required"));
        }
        let declared = headers.get(CONTENT_LENGTH).and_then(|length| length.to_str().ok()?.parse::<u64>().ok());
        if declared.is_some_and(|length| length > self.config.max_body_bytes as u64) {
            return Err(TOO_LARGE);
        }
        Ok(())
    }

    async fn post(
        &self,
        headers: &HeaderMap,
        body: &mut Incoming,
        ends: &Ends,
    ) -> Result<Response<Full<Bytes>>, Refusal> {
        let read =
            ends.transport.run_until_cancelled(read(body, self.config.max_body_bytes, self.config.body_pause)).await;
        let body = read.ok_or(TIMED_OUT)??;
        let body = String::from_utf8_lossy(&body);
        let Some((status, answer)) = self.dispatcher.dispatch(&body, headers, ends).await else {
            let mut response = Response::new(Full::default());
            *response.status_mut() = StatusCode::NO_CONTENT;
            return Ok(response);
        };
        let mut response = Response::new(Full::from(answer));
        *response.status_mut() = status;
        response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        Ok(response)
    }
}

fn shutting_down() -> io::Error {
    io::Error::other("shutting down")
}

const TIMED_OUT: Refusal = (StatusCode::REQUEST_TIMEOUT, "request timed out");
const TOO_LARGE: Refusal = (StatusCode::PAYLOAD_TOO_LARGE, "request body too large");

/// Reads a whole body of at most `limit` bytes, which may pause for `pause`.
async fn read(body: &mut Incoming, limit: usize, pause: Duration) -> Result<Bytes, Refusal> {
    let mut whole = BytesMut::new();
    while let Some(frame) = tokio::time::timeout(pause, body.frame()).await.map_err(|_| TIMED_OUT)? {
        // The client has gone: nobody will read this answer.
        let frame = frame.map_err(|_| (StatusCode::BAD_REQUEST, "request body broke off"))?;
        if let Ok(data) = frame.into_data() {
            if whole.len() + data.len() > limit {
                return Err(TOO_LARGE);
            }
            whole.extend_from_slice(&data);
        }
    }
    Ok(whole.freeze())
}

/// Reads what is left of a body and throws it away: a sender that is cut off while it writes loses the answer.
async fn discard(body: &mut Incoming) {
    let mut size = 0;
    while let Ok(Some(Ok(frame))) = tokio::time::timeout(DISCARD_PAUSE, body.frame()).await {
        size += frame.data_ref().map_or(0, Bytes::len);
        if size > MAX_DISCARDED_BYTES {
            return;
        }
    }
}

/// The one value of a header; two lines of it mean that two parties read the request differently.
fn single(headers: &HeaderMap, name: HeaderName) -> Option<&str> {
    let mut values = headers.get_all(name).iter();
    let value = values.next()?.to_str().ok()?;
    values.next().is_none().then_some(value.trim())
}

/// Whether a Host is this machine, whatever its port.
fn is_local_host(host: &str) -> bool {
    if host.starts_with("[::1]") {
        return true;
    }
    let name = host.rsplit_once(':').map_or(host, |(name, _)| name);
    name == "127.0.0.1" || name.eq_ignore_ascii_case("localhost")
}

/// What a person reads who opens the address.
fn probe(headers: &HeaderMap) -> String {
    let host = single(headers, HOST).unwrap_or_default();
    format!("OpenClaw MCP server. MCP clients send POST requests to http://{host}/ with the bearer token.\n")
}

fn text(status: StatusCode, text: &str) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::from(text.to_owned()));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    response
}
