//! An MCP server that already exists, as a [`Lender`]: rmcp is its client, this keeps it running and passes on.
//!
//! The server is a child process on stdio, or is reached by URL. One task owns the connection; when it breaks, the
//! server is started or connected to again, and calls meanwhile fail with a sentence. Tools and results go through
//! rmcp's types: what MCP does not define in them is lost, members may change their order, and numbers are those of
//! an `i64`, a `u64` or a double.

pub mod http;

use std::collections::{HashMap, VecDeque};
use std::error::Error;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use ::http::Uri;
use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientCapabilities, ClientConfig, ClientRequest, Implementation,
    JsonObject, ProgressNotificationParam, ProgressToken, ProtocolVersion, RequestMetaObject, ServerResult,
};
use rmcp::service::{
    ClientInitializeError, ClientLifecycleMode, ClientServiceExt, NotificationContext, PeerRequestOptions,
    RunningService, ServiceError,
};
use rmcp::transport::streamable_http_client::{StreamableHttpClientTransportConfig, StreamableHttpError};
use rmcp::transport::{StreamableHttpClientTransport, TokioChildProcess};
use rmcp::{ClientHandler, Peer, RoleClient};
use tokio::process::Command;
use tokio::sync::{Notify, watch};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::backoff::Backoff;
use super::bridge_client::frames::{Answer, Progress};
use super::bridge_client::{Lender, ProgressSink, ToolCall};
use super::capabilities::program;
use super::filter::{self, Filter};
use super::lender::LENT_BY_DEFAULT;
use crate::json;
use http::{MAX_JSON_BYTES, UpstreamHttp, UpstreamHttpError};

/// How long the server may take to start: a package runner may have to download it.
const START_TIMEOUT: Duration = Duration::from_secs(180);
/// How long it may take to list its tools.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// How often the tools of a server that does not tell of changes are listed.
const POLL_INTERVAL: Duration = Duration::from_secs(30);
/// How long a server may take to end: rmcp closes its stdin, then signals, then kills.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Progress that comes before its call is known here; rmcp names a request only after it was sent.
const MAX_EARLY_REPORTS: usize = 16;

/// Where the server is.
#[derive(Debug, Clone)]
pub enum Source {
    /// It runs already.
    Url {
        /// Its MCP endpoint.
        uri: Uri,
        /// The file with its token.
        token_file: Option<PathBuf>,
    },
    /// It is a program that speaks on stdio.
    Command {
        /// The program.
        program: String,
        /// Its arguments.
        args: Vec<String>,
    },
}

/// What the server says of itself.
#[derive(Debug, Clone)]
pub struct About {
    /// Its name.
    pub name: Option<String>,
    /// Its name for people.
    pub title: Option<String>,
    /// What a model should know of it.
    pub instructions: Option<String>,
}

/// The server.
#[derive(Debug)]
pub struct Upstream {
    source: Source,
    filter: Filter,
    tools: watch::Sender<Arc<str>>,
    peer: Mutex<Option<Peer<RoleClient>>>,
    events: Arc<Events>,
    /// It is a node's local MCP server, or the desktop app's.
    is_desktop: AtomicBool,
}

/// The names of servers that lend a desktop: a node's own, and that of OpenClaw's app for Windows.
const DESKTOPS: [&str; 2] = ["openclaw-node", "openclaw-tray-mcp"];

/// What the server says unasked, and doubts about it.
#[derive(Debug, Default)]
struct Events {
    list_changed: Notify,
    /// A request could not be sent, so the connection may be of no use any more.
    doubted: Notify,
    reports: Mutex<Reports>,
}

#[derive(Debug, Default)]
struct Reports {
    sinks: HashMap<ProgressToken, ProgressSink>,
    early: VecDeque<(ProgressToken, Progress)>,
}

type Connection = RunningService<RoleClient, Client>;

impl Upstream {
    /// Starts the server, or connects to it, and lists its tools. The task that is returned keeps it running until
    /// `stop`, and ends when the server has.
    ///
    /// # Errors
    /// A sentence, if it cannot be used.
    pub async fn start(
        source: Source,
        filter: Filter,
        stop: CancellationToken,
    ) -> Result<(Arc<Self>, About, JoinHandle<()>), String> {
        let upstream = Arc::new(Upstream {
            source,
            filter,
            tools: watch::Sender::new("[]".into()),
            peer: Mutex::default(),
            events: Arc::default(),
            is_desktop: AtomicBool::new(false),
        });
        let starting = upstream.connect();
        let connection = match stop.run_until_cancelled(starting).await {
            Some(connection) => connection?,
            None => return Err("It was told to stop.".into()),
        };
        let info = connection.peer().peer_info();
        let server = info.as_ref().and_then(|info| info.server_info.as_ref());
        let about = About {
            name: server.map(|server| server.name.clone()),
            title: server.and_then(|server| server.title.clone()),
            instructions: info.as_ref().and_then(|info| info.instructions.clone()),
        };
        let running = tokio::spawn(Arc::clone(&upstream).keep_running(connection, stop));
        Ok((upstream, about, running))
    }

    /// Whether a tool of this name is lent. Of a desktop's own server only what [`serve`](super::serve) would lend is,
    /// unless it is said what else, and what steers the desktop's app never is.
    fn lends(&self, name: &str) -> bool {
        if !self.is_desktop.load(Ordering::Relaxed) {
            return self.filter.takes(name);
        }
        let is_own = name.get(..4).is_some_and(|start| start.eq_ignore_ascii_case("app."));
        let is_harmless = || LENT_BY_DEFAULT.iter().any(|pattern| filter::matches(pattern, name));
        !is_own && self.filter.takes(name) && (!self.filter.include.is_empty() || is_harmless())
    }

    /// How the server is called in messages. A URL may hold secrets, so only its host is told.
    fn name(&self) -> String {
        match &self.source {
            Source::Url { uri, .. } => format!("The MCP server at {}", uri.authority().map_or("", |a| a.as_str())),
            Source::Command { program, .. } => format!("The MCP server '{program}'"),
        }
    }

    async fn connect(&self) -> Result<Connection, String> {
        let failed = |why: &dyn std::fmt::Display| format!("{} cannot be used: {why}.", self.name());
        // All servers but the very newest know the handshake; those that do not refuse it with a JSON-RPC error.
        let modern = ClientLifecycleMode::Discover { preferred_versions: vec![ProtocolVersion::V_2026_07_28] };
        let connecting = async {
            match self.connect_as(ClientLifecycleMode::Initialize).await? {
                Err(ClientInitializeError::JsonRpcError(error)) => {
                    self.connect_as(modern).await?.map_err(|_| failed(&error.message))
                }
                connected => connected.map_err(|error| failed(&reason(&error))),
            }
        };
        let connection = tokio::time::timeout(START_TIMEOUT, connecting);
        let connection = connection.await.map_err(|_| failed(&"it does not answer"))??;
        let name = connection.peer().peer_info().and_then(|info| info.server_info.as_ref().map(|s| s.name.clone()));
        let is_desktop = name.is_some_and(|name| DESKTOPS.contains(&&*name));
        self.is_desktop.store(is_desktop, Ordering::Relaxed);
        self.list(connection.peer()).await.map_err(|why| failed(&why))?;
        *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = Some(connection.peer().clone());
        Ok(connection)
    }

    async fn connect_as(&self, mode: ClientLifecycleMode) -> Result<Result<Connection, ClientInitializeError>, String> {
        let client = Client { events: Arc::clone(&self.events) };
        Ok(match &self.source {
            Source::Url { uri, token_file } => {
                let http = UpstreamHttp::new(uri, token_file.clone())?;
                let config = StreamableHttpClientTransportConfig::with_uri(uri.to_string())
                    .max_json_response_size(MAX_JSON_BYTES);
                let transport = StreamableHttpClientTransport::with_client(http, config);
                client.serve_with_lifecycle(transport, mode).await
            }
            Source::Command { program, args } => {
                let transport = spawn(program, args).map_err(|error| format!("'{program}' cannot be run: {error}."))?;
                client.serve_with_lifecycle(transport, mode).await
            }
        })
    }

    /// Owns the connection, and makes another one when it breaks.
    async fn keep_running(self: Arc<Self>, mut connection: Connection, stop: CancellationToken) {
        let mut backoff = Backoff::default();
        loop {
            let since = Instant::now();
            let end = self.watch(connection, &stop).await;
            *self.peer.lock().unwrap_or_else(PoisonError::into_inner) = None;
            if end.is_none() {
                return;
            }
            backoff.worked(since.elapsed());
            connection = loop {
                let pause = backoff.pause();
                tracing::warn!(pause_ms = pause.as_millis() as u64, "{} has gone; starting again", self.name());
                let again = async {
                    tokio::time::sleep(pause).await;
                    self.connect().await
                };
                match stop.run_until_cancelled(again).await {
                    None => return,
                    Some(Ok(connection)) => break connection,
                    Some(Err(why)) => tracing::warn!("{why}"),
                }
            };
            tracing::info!("{} is back", self.name());
        }
    }

    /// Keeps the list of tools up to date until the connection is of no use any more; `None` if it was told to stop.
    async fn watch(&self, connection: Connection, stop: &CancellationToken) -> Option<()> {
        let peer = connection.peer().clone();
        let tells_of_changes = peer.peer_info().is_some_and(|info| {
            let tools = info.capabilities.tools.as_ref();
            info.protocol_version.has_initialize() && tools.is_some_and(|tools| tools.list_changed == Some(true))
        });
        let mut poll = tokio::time::interval_at(tokio::time::Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
        let end = connection.cancellation_token();
        let ended = connection.waiting();
        tokio::pin!(ended);
        let must_stop = loop {
            let is_doubted = tokio::select! {
                _ = &mut ended => return Some(()),
                () = stop.cancelled() => break true,
                () = self.events.doubted.notified() => true,
                () = self.events.list_changed.notified() => false,
                _ = poll.tick(), if !tells_of_changes => false,
            };
            if let Err(why) = self.list(&peer).await {
                tracing::warn!("{} does not list its tools: {why}", self.name());
                if is_doubted {
                    break false;
                }
            }
        };
        end.cancel();
        let _late = tokio::time::timeout(STOP_TIMEOUT, ended).await;
        (!must_stop).then_some(())
    }

    /// Lists the tools, all pages of them.
    async fn list(&self, peer: &Peer<RoleClient>) -> Result<(), String> {
        let tools = tokio::time::timeout(LIST_TIMEOUT, peer.list_all_tools()).await;
        let mut tools = tools.map_err(|_| "it does not answer".to_owned())?.map_err(|error| reason(&error))?;
        tools.retain(|tool| self.lends(&tool.name));
        let text: Arc<str> = serde_json::to_string(&tools).map_err(|error| error.to_string())?.into();
        self.tools.send_if_modified(|current| {
            let is_new = **current != *text;
            *current = text;
            is_new
        });
        Ok(())
    }

    fn answer(&self, outcome: Result<ServerResult, ServiceError>) -> Answer {
        let name = self.name();
        match outcome {
            Ok(ServerResult::EmptyResult(_)) => Answer::Result(r#"{"content":[]}"#.into()),
            Ok(result) => match serde_json::to_string(&result) {
                Ok(text) => Answer::Result(text),
                Err(error) => Answer::Failed(format!("{name} gave a result that cannot be passed on: {error}.")),
            },
            Err(ServiceError::McpError(error)) => Answer::RpcError {
                code: error.code.0.into(),
                message: error.message.into_owned(),
                data: error.data.map(|data| data.to_string()),
            },
            Err(ServiceError::TransportClosed) => {
                Answer::Failed(format!("{name} ended before the tool answered. The tool may have run."))
            }
            Err(error) => {
                // A server that refuses the token is there.
                if matches!(error, ServiceError::TransportSend(_)) && !chain(&error).any(is_unauthorized) {
                    self.events.doubted.notify_one();
                }
                Answer::Failed(format!("{name} did not answer: {}.", reason(&error)))
            }
        }
    }
}

impl Lender for Upstream {
    fn tools(&self) -> watch::Receiver<Arc<str>> {
        self.tools.subscribe()
    }

    async fn call(&self, call: ToolCall, progress: ProgressSink, cancelled: CancellationToken) -> Answer {
        let Some(peer) = self.peer.lock().unwrap_or_else(PoisonError::into_inner).clone() else {
            let name = self.name();
            return Answer::Failed(format!("{name} does not run; it is being started again. Retry in a few seconds."));
        };
        if !self.lends(&call.tool) {
            return Answer::Failed(format!("The tool '{}' is not lent.", call.tool));
        }
        let (request, options) = match request(call) {
            Ok(request) => request,
            Err(error) => return Answer::Failed(format!("The call cannot be passed on: {error}.")),
        };
        let mut handle = match peer.send_request_with_option(request, options).await {
            Ok(handle) => handle,
            Err(error) => return self.answer(Err(error)),
        };
        let _reports = self.events.subscribe(handle.progress_token.clone(), progress);
        tokio::select! {
            outcome = &mut handle.rx => self.answer(outcome.unwrap_or(Err(ServiceError::TransportClosed))),
            () = cancelled.cancelled() => {
                // If it cannot be told, it has gone.
                let _gone = handle.cancel(Some("The caller does not want the answer any more.".into())).await;
                Answer::Failed("The call was cancelled.".into())
            }
        }
    }
}

fn request(call: ToolCall) -> serde_json::Result<(ClientRequest, PeerRequestOptions)> {
    let mut params = CallToolRequestParams::new(call.tool);
    params.arguments = Some(serde_json::from_str(&call.arguments)?);
    params.input_responses = call.input_responses.as_deref().map(serde_json::from_str).transpose()?;
    params.request_state = call.request_state.as_deref().and_then(json::as_string).map(String::from);
    let mut options = PeerRequestOptions::no_options();
    if let Some(meta) = call.meta.as_deref() {
        options = options.with_meta(RequestMetaObject::from(serde_json::from_str::<JsonObject>(meta)?));
    }
    Ok((ClientRequest::CallToolRequest(CallToolRequest::new(params)), options))
}

/// The program, as the leader of a group of its own: what it starts ends with it, and Ctrl-C does not reach it
/// before its calls are over.
fn spawn(name: &str, args: &[String]) -> std::io::Result<TokioChildProcess> {
    // By a bare name Windows itself starts nothing but what ends with .exe, and npx for one does not.
    let found = cfg!(windows).then(|| program::find(name)).flatten();
    let mut command = found.map_or_else(|| Command::new(name), Command::new);
    // Whose token it is, is no business of the server's.
    command.args(args).env_remove("OPENCLAW_PROXY_APP_TOKEN");
    let mut command = program::as_group(command);
    command.wrap(process_wrap::tokio::KillOnDrop);
    TokioChildProcess::new(command)
}

/// What lies beneath an error: the outer ones only say that there was one.
fn reason(error: &(dyn Error + 'static)) -> String {
    let innermost = chain(error).last().map_or_else(String::new, ToString::to_string);
    innermost.trim_start_matches("Client error: ").trim_end_matches('.').to_owned()
}

fn is_unauthorized(error: &(dyn Error + 'static)) -> bool {
    let error = error.downcast_ref::<StreamableHttpError<UpstreamHttpError>>();
    matches!(error, Some(StreamableHttpError::Client(UpstreamHttpError::Unauthorized)))
}

fn chain<'a>(error: &'a (dyn Error + 'static)) -> impl Iterator<Item = &'a (dyn Error + 'static)> {
    std::iter::successors(Some(error), |&error| error.source())
}

/// Our side of the connection: it hears what the server says unasked.
#[derive(Debug)]
struct Client {
    events: Arc<Events>,
}

impl ClientHandler for Client {
    fn get_info(&self) -> ClientConfig {
        let us = Implementation::new("openclaw-node", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), us)
    }

    async fn on_progress(&self, params: ProgressNotificationParam, _: NotificationContext<RoleClient>) {
        let progress = Progress { progress: params.progress, total: params.total, message: params.message };
        self.events.report(params.progress_token, progress);
    }

    async fn on_tool_list_changed(&self, _: NotificationContext<RoleClient>) {
        self.events.list_changed.notify_one();
    }
}

impl Events {
    fn report(&self, token: ProgressToken, progress: Progress) {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(sink) = reports.sinks.get(&token) {
            return sink.report(&progress);
        }
        reports.early.push_back((token, progress));
        if reports.early.len() > MAX_EARLY_REPORTS {
            reports.early.pop_front();
        }
    }

    fn subscribe(self: &Arc<Self>, token: ProgressToken, sink: ProgressSink) -> Subscription {
        let mut reports = self.reports.lock().unwrap_or_else(PoisonError::into_inner);
        reports.early.retain(|(early, progress)| {
            let is_ours = *early == token;
            if is_ours {
                sink.report(progress);
            }
            !is_ours
        });
        reports.sinks.insert(token.clone(), sink);
        Subscription { events: Arc::clone(self), token }
    }
}

/// For as long as it lives, a call hears of its progress.
struct Subscription {
    events: Arc<Events>,
    token: ProgressToken,
}

impl Drop for Subscription {
    fn drop(&mut self) {
        self.events.reports.lock().unwrap_or_else(PoisonError::into_inner).sinks.remove(&self.token);
    }
}
