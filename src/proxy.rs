//! The proxy: a server of two sides. Apps register sessions and connect bridges; MCP clients list and call.
//!
//! [`Server`] owns everything: the sweeper, every connection and every bridge run in its tasks and end with it.
//! It takes its listener and its shutdown token from outside, so that a test can start many of them.

pub mod admin;
pub mod api;
pub mod audit;
pub mod body;
pub mod bridge;
pub mod config;
pub mod connection;
pub mod cors;
pub mod error;
pub mod gate;
pub mod listener;
pub mod mcp;
pub mod memory;
pub mod metrics;
pub mod rates;
pub mod records;
pub mod refusals;
pub mod registry;
pub mod routes;
pub mod session;
pub mod start;
pub mod state_file;
pub mod tenants;
pub mod trace;

use std::future::poll_fn;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::{Duration, Instant, SystemTime};

use axum::Router;
use dashmap::{DashMap, Entry};
use http::HeaderMap;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::{Service, service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::LastToken;
use crate::mcp::AnswerSettings;
use crate::process;
use admin::Admin;
use bridge::BridgeLimits;
use bridge::socket::{Graces, SocketSettings};
use config::Config;
use connection::{Busy, ClientStream, Clocks};
use gate::Gate;
use listener::{Listen, Listener, Stream};
use metrics::{Label, Limit};
use rates::Rates;
use records::Records;
use registry::Registry;
use state_file::{Changes, StateFile, StateFileError};
use tenants::{Count, Role, Tenants, TenantsError};
use trace::Tracer;
use trace::export::Exporter;

/// How long bridges may take to say goodbye at shutdown, once the calls have ended.
const CLOSE_GRACE: Duration = Duration::from_secs(5);
/// How long the operator's connections may take to end, once all else has.
const OPERATOR_GRACE: Duration = Duration::from_secs(1);
/// How long to wait when no connection can be accepted (out of file descriptors, most likely).
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// How long reading the file of tenants may take.
const READ_TIMEOUT: Duration = Duration::from_secs(5);
/// How long it may take to bring the sessions of an earlier process back.
const RESTORE_TIMEOUT: Duration = Duration::from_secs(60);
/// How often it is logged that connections are refused.
const COMPLAINT_INTERVAL: Duration = Duration::from_secs(10);

/// A request as the handlers get it.
pub type Request = http::Request<axum::body::Body>;

/// What all handlers share.
#[derive(Debug)]
pub struct ProxyState {
    config: Config,
    gate: Gate,
    /// Where it listens.
    address: Listen,
    started: SystemTime,
    tenants: Tenants,
    registry: Registry,
    /// The calls in flight, everybody's.
    calls: Arc<Count>,
    /// The bytes of requests in memory, everybody's.
    request_bytes: Arc<Count>,
    /// Places of connections.
    connections: Arc<Semaphore>,
    rates: Rates,
    records: Arc<Records>,
    /// Places of sockets that are open only to be refused.
    refused_sockets: Arc<Semaphore>,
    /// Bridges, which hyper does not know any more after their upgrade.
    tasks: TaskTracker,
    draining: AtomicBool,
    /// Which sessions are to be written into the state file.
    changes: Option<Arc<Changes>>,
    /// Ends when nothing may be waited for any more.
    closing: CancellationToken,
}

impl ProxyState {
    fn new(config: Config, address: Listen, tracer: Option<Tracer>) -> Result<Self, TenantsError> {
        let limits = BridgeLimits {
            calls: config.max_calls_per_session,
            call_bytes: config.max_call_bytes_per_session,
            queue_bytes: config.max_queue_bytes,
            result_bytes: config.max_result_bytes,
            progress_bytes: config.max_progress_bytes,
            json_depth: config.max_json_depth,
            resume_grace: config.resume_grace.0,
        };
        let changes = config.state_file.is_some().then(Arc::default);
        let recent = config.admin_listen.map(|_| config.recent_calls);
        let records = Arc::new(Records::new(recent, tracer));
        Ok(ProxyState {
            gate: Gate::new(&config, address.ip()),
            address,
            started: SystemTime::now(),
            tenants: Tenants::new(&config)?,
            registry: Registry::new(
                config.session_ttl.0,
                config.max_sessions,
                config.max_listeners_per_session,
                limits,
                Arc::clone(&records),
                changes.clone(),
            ),
            calls: Arc::new(Count::new(config.max_calls)),
            request_bytes: Arc::new(Count::new(config.max_request_bytes)),
            connections: Arc::new(Semaphore::new(config.max_connections)),
            rates: Rates::new(&config, Arc::clone(&records)),
            records,
            refused_sockets: Arc::new(Semaphore::new(config.max_refused_sockets)),
            tasks: TaskTracker::new(),
            draining: AtomicBool::new(false),
            changes,
            closing: CancellationToken::new(),
            config,
        })
    }

    /// Ends what tenants and tokens that are gone have left: how many sessions and bridges those were. It goes by who
    /// is there and not by who has just left, for whoever was on the way in then comes later.
    fn enforce_tenants(&self) -> (usize, usize) {
        let ended = self.registry.revoke(|tenant| self.tenants.has(tenant));
        let cut = self.registry.cut_bridges(|token, tenant| self.tenants.opens(Role::App, token, tenant));
        (ended, cut)
    }

    fn is_draining(&self) -> bool {
        self.draining.load(Ordering::Relaxed)
    }

    /// How many connections there are.
    fn connections(&self) -> usize {
        self.config.max_connections - self.connections.available_permits()
    }

    /// Where a request really comes from.
    fn client_ip(&self, extensions: &http::Extensions, headers: &HeaderMap) -> IpAddr {
        let peer = extensions.get::<Peer>().map_or(std::net::Ipv4Addr::UNSPECIFIED.into(), |peer| peer.ip);
        gate::client_ip(&self.config, headers, peer)
    }

    fn socket_settings(&self) -> SocketSettings {
        SocketSettings {
            ping: self.config.ping.0,
            probe: self.config.probe.0,
            max_message_bytes: self.config.max_bridge_message_bytes,
            message_timeout: self.config.message_timeout.0,
            write_stall: self.config.write_stall.0,
            max_bad_frames: self.config.max_bad_frames,
        }
    }

    fn graces(&self) -> Graces {
        Graces { tasks: self.tasks.clone(), stop: self.closing.clone() }
    }

    fn answer_settings(&self) -> AnswerSettings {
        AnswerSettings {
            stream_after: self.config.stream_after.0,
            // The connection's clock runs while a stream is open, and only what is written stops it.
            keep_alive: self.config.keep_alive.0.min(self.config.idle.0 / 2),
            max_result_bytes: self.config.max_result_bytes,
        }
    }
}

/// Where a connection comes from, and its place among those that are allowed at once.
#[derive(Debug, Clone)]
struct Peer {
    ip: IpAddr,
    _place: Arc<(OwnedSemaphorePermit, Option<AddressPlace>)>,
}

/// How many connections each address has that is no trusted proxy.
#[derive(Debug, Default)]
struct Addresses(DashMap<IpAddr, usize>);

impl Addresses {
    /// One more of this address, unless it has as many as it may.
    fn take(self: &Arc<Self>, ip: IpAddr, most: usize) -> Option<AddressPlace> {
        let mut count = self.0.entry(ip).or_default();
        if *count >= most {
            return None;
        }
        *count += 1;
        Some(AddressPlace { addresses: Arc::clone(self), ip })
    }
}

/// A connection's place among those of its address.
#[derive(Debug)]
struct AddressPlace {
    addresses: Arc<Addresses>,
    ip: IpAddr,
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        if let Entry::Occupied(mut count) = self.addresses.0.entry(self.ip) {
            *count.get_mut() -= 1;
            if *count.get() == 0 {
                count.remove();
            }
        }
    }
}

/// Why the operator's address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address} for the operator: {error}; set OPENCLAW_PROXY_ADMIN_LISTEN to another address.")]
pub struct OperatorError {
    address: SocketAddr,
    error: io::Error,
}

/// A proxy that listens.
#[derive(Debug)]
pub struct Server {
    listener: Listener,
    address: Listen,
    admin: Option<Listener>,
    state_file: Option<StateFile>,
    exporter: Option<Exporter>,
    state: Arc<ProxyState>,
}

impl Server {
    /// Listens where the settings say.
    ///
    /// # Errors
    /// If the address cannot be bound; a [`TenantsError`] inside, if the file of tenants cannot be used.
    pub async fn bind(config: Config) -> io::Result<Self> {
        let listener = Listener::bind(&config.listen).await?;
        Self::on(listener, config).await
    }

    /// Serves on a listener that is bound already, and listens for the operator where the settings say.
    ///
    /// # Errors
    /// If the operator's address cannot be bound, or a file that the settings name cannot be used.
    pub async fn on(listener: Listener, config: Config) -> io::Result<Self> {
        let admin = match config.admin_listen {
            None => None,
            Some(address) => {
                let bound = Listener::bind(&Listen::Tcp(address)).await;
                Some(bound.map_err(|error| io::Error::other(OperatorError { address, error }))?)
            }
        };
        let address = listener.address()?;
        let traced = config.tracing.as_ref().map(trace::open).transpose().map_err(io::Error::other)?;
        let (tracer, exporter) = traced.unzip();
        // Files may be where reading takes for ever.
        let (tenants_file, at) = (config.tenants_file.clone().unwrap_or_default(), address.clone());
        let state = within(READ_TIMEOUT, move || ProxyState::new(config, at, tracer)).await;
        let state = state.unwrap_or_else(|why| Err(TenantsError::unreadable(&tenants_file, &why)));
        let state = Arc::new(state.map_err(io::Error::other)?);
        let state_file = match &state.config.state_file {
            None => None,
            Some(path) => {
                let opening = Arc::clone(&state);
                let file = within(RESTORE_TIMEOUT, move || StateFile::open(&opening)).await;
                let file = file.unwrap_or_else(|why| Err(StateFileError::unreadable(path, &why)));
                Some(file.map_err(io::Error::other)?)
            }
        };
        Ok(Server { listener, address, admin, state_file, exporter, state })
    }

    /// What reads the file of tenants again.
    pub fn reload(&self) -> Reload {
        Reload { state: Arc::clone(&self.state), reading: None }
    }

    /// Where it listens.
    pub fn address(&self) -> &Listen {
        &self.address
    }

    /// The operator's address, if there is one.
    pub fn admin_addr(&self) -> Option<SocketAddr> {
        self.admin.as_ref().and_then(|listener| listener.address().ok()?.tcp())
    }

    /// The sessions, for tests and for the program around the server.
    pub fn registry(&self) -> impl Fn() -> usize + Send + Sync + 'static + use<> {
        let state = Arc::clone(&self.state);
        move || state.registry.len()
    }

    /// Serves until `shutdown`, and then until the calls in flight have ended or their time is over: new calls are
    /// refused, streams of changes end, calls are finished, bridges are closed with 1012.
    pub async fn run(self, shutdown: CancellationToken) {
        let Server { listener, admin, state_file, exporter, state, .. } = self;
        // For what ends when nothing more happens.
        let stop_keeping = CancellationToken::new();
        let keeper = state_file.zip(state.changes.clone()).map(|(file, changes)| {
            tokio::spawn(state_file::keep(file, changes, Arc::clone(&state), stop_keeping.clone()))
        });
        let exporting =
            exporter.map(|exporter| tokio::spawn(exporter.run(Arc::clone(&state.records), stop_keeping.clone())));
        let connections = TaskTracker::new();
        let admin = admin.map(|listener| tokio::spawn(serve_operator(listener, Arc::clone(&state))));
        let sweeper = tokio::spawn(sweep(Arc::clone(&state), shutdown.clone()));
        let door = Door::public(&state);
        accept(&listener, &door, &state, &connections, &shutdown).await;
        drop(listener);
        state.draining.store(true, Ordering::Relaxed);
        state.registry.dismiss_listeners();
        state.registry.end_waiting(Instant::now());
        connections.close();
        state.tasks.close();
        tracing::info!(calls_in_flight = state.registry.calls_in_flight(), "shutting down");
        // Each connection ends once its request is answered.
        if tokio::time::timeout(state.config.drain.0, connections.wait()).await.is_err() {
            tracing::warn!(calls_in_flight = state.registry.calls_in_flight(), "calls did not end in time");
        }
        state.registry.shut_down(state.config.reconnects_per_second);
        state.closing.cancel();
        let ended = async { tokio::join!(connections.wait(), state.tasks.wait()) };
        if tokio::time::timeout(CLOSE_GRACE, ended).await.is_err() {
            tracing::warn!(open = connections.len() + state.tasks.len(), "connections did not close in time");
        }
        // It waits for nothing but the token that has just ended.
        let _joined = sweeper.await;
        state.records.tell_refusals(Instant::now() + refusals::WINDOW);
        process::audit::complain(Instant::now());
        stop_keeping.cancel();
        if let Some(keeper) = keeper
            && tokio::time::timeout(CLOSE_GRACE, keeper).await.is_err()
        {
            tracing::error!("the state file could not be written in time; its last changes are lost");
        }
        if let Some(exporting) = exporting {
            // It has a deadline of its own, and has been at it as long as the keeper.
            let _joined = exporting.await;
        }
        if let Some(admin) = admin {
            let _joined = admin.await;
        }
    }
}

/// Reads the file of tenants again. Bridges whose token is still there stay; sessions of tenants that are gone end.
#[derive(Debug)]
pub struct Reload {
    state: Arc<ProxyState>,
    /// A reading that did not end in time.
    reading: Option<JoinHandle<io::Result<String>>>,
}

impl Reload {
    /// Does it; the answer is a sentence for the log.
    ///
    /// # Errors
    /// [`TenantsError`] if the file cannot be used, or not be read within some seconds; then all is as it was.
    pub async fn run(&mut self) -> Result<String, TenantsError> {
        let Some(file) = self.state.config.tenants_file.clone() else {
            return Ok("There is no file of tenants.".into());
        };
        if self.reading.as_ref().is_some_and(|reading| !reading.is_finished()) {
            return Err(TenantsError::unreadable(&file, &"it is still being read since the last time"));
        }
        let path = file.clone();
        // A disk of the network that hangs must cost a thread and nothing else.
        let mut reading = tokio::task::spawn_blocking(move || process::file::read(&path));
        let text = match tokio::time::timeout(READ_TIMEOUT, &mut reading).await {
            Ok(read) => read.unwrap_or_else(|error| Err(io::Error::other(error))),
            Err(_) => {
                self.reading = Some(reading);
                Err(io::Error::other(format!("it took longer than {} s", READ_TIMEOUT.as_secs())))
            }
        };
        let text = text.map_err(|error| TenantsError::unreadable(&file, &error))?;
        let state = Arc::clone(&self.state);
        let reloaded = tokio::task::spawn_blocking(move || state.tenants.reload(&file, &text));
        let reloaded = reloaded.await.map_err(|error| TenantsError::unreadable(Path::new("?"), &error))??;
        let (ended, cut) = self.state.enforce_tenants();
        let (tenants, gone) = (reloaded.tenants, reloaded.gone.len());
        Ok(format!(
            "The file of tenants is read again: {tenants} tenants; {gone} gone, with {ended} sessions; {cut} bridges closed whose token is gone."
        ))
    }
}

/// Forgets expired sessions, and tells what waits to be told, for as long as the server runs.
async fn sweep(state: Arc<ProxyState>, shutdown: CancellationToken) {
    let mut ticks = tokio::time::interval(refusals::WINDOW);
    let mut last = None;
    while shutdown.run_until_cancelled(ticks.tick()).await.is_some() {
        let now = Instant::now();
        state.records.tell_refusals(now);
        process::audit::complain(now);
        if last.is_some_and(|last| now.duration_since(last) < registry::SWEEP_INTERVAL) {
            continue;
        }
        last = Some(now);
        state.rates.sweep();
        state.enforce_tenants();
        let expired = state.registry.sweep(Instant::now());
        if expired > 0 {
            tracing::info!(expired, sessions = state.registry.len(), "sessions expired");
        }
    }
}

/// Lets a complaint through now and then: what happens to every connection would fill the log.
#[derive(Debug, Default)]
struct Complaints {
    last: Option<Instant>,
}

impl Complaints {
    fn allow(&mut self) -> bool {
        let now = Instant::now();
        let is_due = self.last.is_none_or(|last| now.duration_since(last) >= COMPLAINT_INTERVAL);
        if is_due {
            self.last = Some(now);
        }
        is_due
    }
}

/// What is behind a listener, and how many may come in.
struct Door {
    router: TowerToHyperService<Router>,
    places: Arc<Semaphore>,
    limit: Limit,
    addresses: Arc<Addresses>,
    most_of_an_address: Option<usize>,
    /// Whether the MCP endpoint is behind it.
    is_public: bool,
}

impl Door {
    fn public(state: &Arc<ProxyState>) -> Self {
        let router = TowerToHyperService::new(routes::router(Arc::clone(state)));
        Door {
            router,
            places: Arc::clone(&state.connections),
            limit: Limit::Connections,
            addresses: Arc::default(),
            most_of_an_address: Some(state.config.max_connections_per_address),
            is_public: true,
        }
    }

    fn operator(admin: &Arc<Admin>, most: usize) -> Self {
        let router = TowerToHyperService::new(admin::router(Arc::clone(admin)));
        let places = Arc::new(Semaphore::new(most));
        Door {
            router,
            places,
            limit: Limit::AdminConnections,
            addresses: Arc::default(),
            most_of_an_address: None,
            is_public: false,
        }
    }
}

/// Serves the operator until nothing may be waited for any more: how the process ends can be watched.
async fn serve_operator(listener: Listener, state: Arc<ProxyState>) {
    let connections = TaskTracker::new();
    let admin = Arc::new(Admin::new(Arc::clone(&state)));
    let door = Door::operator(&admin, state.config.max_admin_connections);
    tokio::select! {
        () = accept(&listener, &door, &state, &connections, &state.closing) => {}
        () = admin.keep_history() => {}
    }
    connections.close();
    if tokio::time::timeout(OPERATOR_GRACE, connections.wait()).await.is_err() {
        tracing::debug!(open = connections.len(), "connections of the operator did not close in time");
    }
}

/// What something comes to that may have to wait for a disk; or why it came to nothing.
async fn within<T: Send + 'static>(time: Duration, what: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    match tokio::time::timeout(time, tokio::task::spawn_blocking(what)).await {
        Ok(result) => result.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it took longer than {} s", time.as_secs())),
    }
}

/// Tells the connections of a listener to end. Looking whether it has been told costs them no lock that all share.
#[derive(Debug, Default)]
struct Leaving {
    is_told: AtomicBool,
    token: CancellationToken,
}

impl Leaving {
    fn tell(&self) {
        self.is_told.store(true, Ordering::Release);
        self.token.cancel();
    }

    /// Drives `connection` until it has ended, or is to end; nothing then.
    async fn or<F: Future>(&self, mut connection: Pin<&mut F>) -> Option<F::Output> {
        let mut told = pin!(self.token.cancelled());
        let mut is_waiting = false;
        poll_fn(|cx| {
            if let Poll::Ready(output) = connection.as_mut().poll(cx) {
                return Poll::Ready(Some(output));
            }
            // The task of a connection stays the same, so that waiting once is enough to be woken.
            let is_due = !std::mem::replace(&mut is_waiting, true) || self.is_told.load(Ordering::Acquire);
            if is_due { told.as_mut().poll(cx).map(|()| None) } else { Poll::Pending }
        })
        .await
    }
}

/// Accepts connections until `shutdown`, which is when they are told to end.
async fn accept(
    listener: &Listener,
    door: &Door,
    state: &Arc<ProxyState>,
    connections: &TaskTracker,
    shutdown: &CancellationToken,
) {
    let mut complaints = Complaints::default();
    let leaving = Arc::new(Leaving::default());
    while let Some(accepted) = shutdown.run_until_cancelled(listener.accept()).await {
        let (stream, ip) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                if complaints.allow() {
                    tracing::warn!(%error, "cannot accept connections");
                }
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(permit) = Arc::clone(&door.places).try_acquire_owned() else {
            state.records.limit(door.limit);
            if complaints.allow() {
                tracing::warn!(limit = door.limit.word(), "too many connections");
            }
            continue;
        };
        let of_address = match door.most_of_an_address {
            Some(most) if !state.config.is_trusted(ip) => {
                let place = door.addresses.take(rates::network_of(ip), most);
                if place.is_none() {
                    state.records.limit(Limit::ConnectionsPerAddress);
                    continue;
                }
                place
            }
            _ => None,
        };
        let peer = Peer { ip, _place: Arc::new((permit, of_address)) };
        let (router, is_public) = (door.router.clone(), door.is_public);
        connections.spawn(serve(stream, peer, router, is_public, Arc::clone(state), Arc::clone(&leaving)));
    }
    leaving.tell();
}

/// Serves one connection.
async fn serve(
    stream: Stream,
    peer: Peer,
    router: TowerToHyperService<Router>,
    is_public: bool,
    state: Arc<ProxyState>,
    leaving: Arc<Leaving>,
) {
    let busy = Busy::default();
    let clocks = Clocks {
        head: state.config.header_timeout.0,
        idle: state.config.idle.0,
        write_stall: state.config.write_stall.0,
    };
    let stream = ClientStream::new(stream, busy.clone(), clocks);
    let (serving, last_token) = (&state, LastToken::default());
    let service = service_fn(|mut request: http::Request<Incoming>| {
        busy.begin();
        let (busy, router, peer, last_token) = (&busy, &router, &peer, &last_token);
        async move {
            let response = if is_public && routes::mcp_session(request.uri().path()).is_some() {
                Ok(mcp::endpoint(serving, peer.ip, last_token, request).await)
            } else {
                request.extensions_mut().insert(peer.clone());
                router.call(request).await
            };
            busy.end();
            response
        }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        // The clocks of ClientStream do this without a timer for each request.
        .header_read_timeout(None)
        .max_buf_size(state.config.max_header_bytes)
        .serve_connection(TokioIo::new(stream), service)
        .with_upgrades();
    let mut connection = pin!(connection);
    let result = match leaving.or(connection.as_mut()).await {
        Some(result) => result,
        None => {
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = result {
        if error.is_parse_too_large() {
            state.records.limit(Limit::HeaderBytes);
        }
        tracing::debug!(%error, "connection ended");
    }
}
