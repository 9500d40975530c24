//! The settings of the proxy: `OPENCLAW_PROXY_*` from the environment, and from `.env` in the working directory; and
//! OpenTelemetry's variables about traces ([`trace::settings`]).
//!
//! Every setting has its default here and a sentence in `.env.example`; a test holds the two together. What is
//! set twice in a contradictory way is refused at start with one sentence.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::{Deserialize, Deserializer};

use crate::auth::Token;
use crate::json;
use crate::process::LogFormat;
use crate::proxy::listener::Listen;
use crate::proxy::session::ToolLimits;
use crate::proxy::trace::{self, settings::TraceSettings};

/// The prefix of every setting.
pub const PREFIX: &str = "OPENCLAW_PROXY_";

/// The most that any bound of a number of things may be, and any bound of bytes: beyond, it is a mistake.
pub const MOST_COUNT: u64 = 1_000_000_000;
/// See [`MOST_COUNT`].
pub const MOST_BYTES: u64 = 1 << 40;

/// What stands in `.env.example` in the place of a token.
const PLACEHOLDER: &str = "replace-me";

/// Settings of the other programs of this package, which may stand in the same environment.
const OTHER_PROGRAMS: [&str; 2] = ["OPENCLAW_PROXY_SERVER_URL", "OPENCLAW_PROXY_SESSION_ID"];

/// The settings, checked.
#[derive(Debug, Clone, Deserialize)]
#[serde(default)]
pub struct Config {
    /// Bearer token of apps: registration and bridge. Empty: no authentication.
    pub app_token: Token,
    /// Bearer token of MCP clients. Empty: no authentication.
    pub openclaw_token: Token,
    /// Where to listen, unless systemd passes a socket on.
    pub listen: Listen,
    /// Where the operator's pages and numbers are; nowhere without it.
    pub admin_listen: Option<SocketAddr>,
    /// What opens them. Empty: nothing is asked for.
    pub admin_token: Token,
    /// How many calls the status page remembers.
    pub recent_calls: usize,
    /// The base of the URLs that apps are given, if the request does not tell it.
    pub public_url: Option<PublicUrl>,
    /// Peers whose `X-Forwarded-Proto` and `X-Forwarded-Host` are believed.
    pub trusted_proxies: Vec<Network>,
    /// Values of `Host` that are accepted beside loopback names and the host of `public_url`.
    pub allowed_hosts: Vec<String>,
    /// Values of `Origin` that are accepted: web pages that may reach the proxy.
    pub allowed_origins: Vec<String>,
    /// Listen beyond loopback although a token is empty.
    pub allow_open: bool,
    /// A file with further tenants.
    pub tenants_file: Option<PathBuf>,
    /// Where sessions are kept beyond the process's life; nowhere without it.
    pub state_file: Option<PathBuf>,
    /// Every session has a secret, whether its app asks for one or not.
    pub require_session_secret: bool,
    /// Which clients' closed connections cancel their call.
    pub cancel_on_disconnect: CancelOnDisconnect,
    /// Whether clients up to 2025-11-25 may GET an event stream, on which they hear of changes of the tools.
    pub legacy_sse: bool,
    /// What is logged: a level, or directives such as `info,openclaw_mcp_proxy=debug`.
    pub log: String,
    /// How it is logged.
    pub log_format: LogFormat,
    /// Where the audit log goes, a line of JSON for each event; nowhere without it.
    pub audit_file: Option<PathBuf>,

    /// How long a session lives after the last sign of its app.
    #[serde(rename = "session_ttl_seconds")]
    pub session_ttl: Seconds,
    /// How long a tool call may take.
    #[serde(rename = "tool_timeout_seconds")]
    pub tool_timeout: Seconds,
    /// When a tool call that is still running is answered by an event stream.
    #[serde(rename = "stream_after_seconds")]
    pub stream_after: Seconds,
    /// How often an event stream gets a comment, so that no proxy cuts it.
    #[serde(rename = "keep_alive_seconds")]
    pub keep_alive: Seconds,
    /// How often a bridge is pinged; two silent intervals close it.
    #[serde(rename = "ping_seconds")]
    pub ping: Seconds,
    /// How long a connected bridge may take to show that it is alive when a second one comes.
    #[serde(rename = "probe_seconds")]
    pub probe: Seconds,
    /// How long the calls of an app that resumes them wait for its return.
    #[serde(rename = "resume_grace_seconds")]
    pub resume_grace: Seconds,
    /// How long an app or a client may take nothing of what is sent to it.
    #[serde(rename = "write_stall_seconds")]
    pub write_stall: Seconds,
    /// How long a message of an app may take from its first byte to its last.
    #[serde(rename = "message_timeout_seconds")]
    pub message_timeout: Seconds,
    /// How long a request's headers may take.
    #[serde(rename = "header_timeout_seconds")]
    pub header_timeout: Seconds,
    /// How long a connection may stay open between two requests.
    #[serde(rename = "idle_seconds")]
    pub idle: Seconds,
    /// How long a request's body may pause.
    #[serde(rename = "body_idle_seconds")]
    pub body_idle: Seconds,
    /// How long a request's body may take in all.
    #[serde(rename = "body_timeout_seconds")]
    pub body_timeout: Seconds,
    /// How long calls in flight may take to finish at shutdown.
    #[serde(rename = "drain_seconds")]
    pub drain: Seconds,
    /// How many apps a second are told to come back after a restart.
    pub reconnects_per_second: u32,

    /// The most tools of a session.
    pub max_tools: usize,
    /// The most bytes of one tool definition.
    pub max_tool_bytes: usize,
    /// The most bytes of all tool definitions of a session.
    pub max_tools_bytes: usize,
    /// The most arguments of a tool that clients repeat in headers.
    pub max_param_headers: usize,
    /// The most bytes of the instructions that come with a registration.
    pub max_instructions_bytes: usize,
    /// The most bytes of a request's body.
    pub max_body_bytes: usize,
    /// The most bytes of a call's HTTP answer.
    pub max_result_bytes: usize,
    /// The most bytes of a progress report of an app's.
    pub max_progress_bytes: usize,
    /// The most bytes of a message from an app; a larger one costs the bridge.
    pub max_bridge_message_bytes: usize,
    /// The most bytes that wait to be sent to one app.
    pub max_queue_bytes: usize,
    /// The deepest nesting of JSON, in both directions.
    pub max_json_depth: usize,
    /// The most calls in flight of a session.
    pub max_calls_per_session: usize,
    /// The most calls in flight of a tenant.
    pub max_calls_per_tenant: usize,
    /// The most calls in flight in all.
    pub max_calls: usize,
    /// The most bytes that the requests of a session's calls in flight take.
    pub max_call_bytes_per_session: usize,
    /// The most bytes of a tenant's requests, and of its apps' messages, in memory.
    pub max_request_bytes_per_tenant: usize,
    /// The most bytes of requests and of apps' messages in memory in all.
    pub max_request_bytes: usize,
    /// The most clients that listen to changes of a session's tools.
    pub max_listeners_per_session: usize,
    /// The most sessions of a tenant.
    pub max_sessions_per_tenant: usize,
    /// The most sessions in all.
    pub max_sessions: usize,
    /// The most messages of a JSON-RPC batch (2025-03-26).
    pub max_batch: usize,
    /// The most requests a second of a client's address; 0: no bound.
    pub max_requests_per_second_per_address: u32,
    /// The most requests a second of a tenant; 0: no bound.
    pub max_requests_per_second_per_tenant: u32,
    /// The most requests a second of a client's address that no valid token comes with; 0: no bound.
    pub max_denials_per_second_per_address: u32,
    /// The most WebSockets that are open only to be told why they are refused.
    pub max_refused_sockets: usize,
    /// The most frames that are no valid bridge messages, a minute, before the bridge is closed.
    pub max_bad_frames: u32,
    /// The most changes of its tools a minute that a session may have; 0: no bound.
    pub max_tool_updates_per_minute: u32,
    /// The most bytes of a request's headers.
    pub max_header_bytes: usize,
    /// The most connections at once.
    pub max_connections: usize,
    /// The most connections of an address that is no trusted proxy.
    pub max_connections_per_address: usize,
    /// The most connections of the operator's at once.
    pub max_admin_connections: usize,

    /// How calls are traced, by OpenTelemetry's own variables.
    #[serde(skip)]
    pub tracing: Option<TraceSettings>,

    /// Variables with our prefix that are no setting: misspelt, most likely.
    #[serde(skip)]
    unknown: Vec<String>,
    /// Variables of OpenTelemetry's about sending traces that do nothing here.
    #[serde(skip)]
    unused: Vec<String>,
}

impl Default for Config {
    fn default() -> Self {
        const KIB: usize = 1024;
        const MIB: usize = 1024 * KIB;
        Config {
            app_token: Token::default(),
            openclaw_token: Token::default(),
            listen: Listen::Tcp(SocketAddr::from(([127, 0, 0, 1], 8000))),
            admin_listen: None,
            admin_token: Token::default(),
            recent_calls: 200,
            public_url: None,
            trusted_proxies: vec![Network::loopback_v4(), Network::loopback_v6()],
            allowed_hosts: Vec::new(),
            allowed_origins: Vec::new(),
            allow_open: false,
            tenants_file: None,
            state_file: None,
            require_session_secret: false,
            cancel_on_disconnect: CancelOnDisconnect::All,
            legacy_sse: false,
            log: "info".into(),
            log_format: LogFormat::Human,
            audit_file: None,
            session_ttl: Seconds::new(300),
            tool_timeout: Seconds::new(120),
            stream_after: Seconds::new(5),
            keep_alive: Seconds::new(15),
            ping: Seconds::new(20),
            probe: Seconds::new(2),
            resume_grace: Seconds::new(15),
            write_stall: Seconds::new(10),
            message_timeout: Seconds(Duration::from_secs(120)),
            header_timeout: Seconds::new(10),
            idle: Seconds::new(90),
            body_idle: Seconds::new(15),
            body_timeout: Seconds::new(60),
            drain: Seconds::new(25),
            reconnects_per_second: 500,
            max_tools: 512,
            max_tool_bytes: 64 * KIB,
            max_tools_bytes: 2 * MIB,
            max_param_headers: 64,
            max_instructions_bytes: 64 * KIB,
            max_body_bytes: 4 * MIB,
            max_result_bytes: 10 * MIB,
            max_progress_bytes: 16 * KIB,
            max_bridge_message_bytes: 32 * MIB,
            max_queue_bytes: 8 * MIB,
            max_json_depth: 64,
            max_calls_per_session: 256,
            max_calls_per_tenant: 1024,
            max_calls: 10_000,
            max_call_bytes_per_session: 64 * MIB,
            max_request_bytes_per_tenant: 256 * MIB,
            max_request_bytes: 512 * MIB,
            max_listeners_per_session: 32,
            max_sessions_per_tenant: 1000,
            max_sessions: 100_000,
            max_batch: 64,
            max_requests_per_second_per_address: 0,
            max_requests_per_second_per_tenant: 0,
            max_denials_per_second_per_address: 50,
            max_refused_sockets: 256,
            max_bad_frames: 20,
            max_tool_updates_per_minute: 60,
            max_header_bytes: 32 * KIB,
            max_connections: 20_000,
            max_connections_per_address: 1000,
            max_admin_connections: 64,
            tracing: None,
            unknown: Vec::new(),
            unused: Vec::new(),
        }
    }
}

/// A setting that cannot be used: one sentence for the operator.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(String);

/// Whether a variable is a setting: ours, or of OpenTelemetry's about traces.
fn is_ours(name: &str) -> bool {
    name.starts_with(PREFIX) || trace::settings::is_ours(name)
}

fn refuse<T>(message: impl Into<String>) -> Result<T, ConfigError> {
    Err(ConfigError(message.into()))
}

/// Settings as they were read, with all that is wrong with them.
#[derive(Debug, Default)]
pub struct Examined {
    /// What holds; the default where a setting cannot be used.
    pub config: Config,
    /// Sentences, each with what mends it.
    pub problems: Vec<String>,
    /// The names of the settings that differ from their defaults, and their values; those of secrets stay here.
    pub changed: Vec<(String, Option<String>)>,
}

impl Config {
    /// Reads the process environment, and beneath it `.env` in the working directory.
    ///
    /// # Errors
    /// [`ConfigError`] if a setting is malformed or contradicts another.
    pub fn from_env() -> Result<Self, ConfigError> {
        Self::examine_env().usable()
    }

    /// The same, whatever is wrong.
    pub fn examine_env() -> Examined {
        let mut problems = Vec::new();
        let mut pairs = dot_env(Path::new(".env")).unwrap_or_else(|error| {
            problems.push(error.to_string());
            Vec::new()
        });
        for (name, value) in std::env::vars_os() {
            let Some(name) = name.to_str().filter(|name| is_ours(name)) else { continue };
            match value.into_string() {
                Ok(value) => pairs.push((name.to_owned(), value)),
                Err(_) => problems.push(format!("{name} is not valid UTF-8; set it anew.")),
            }
        }
        let mut examined = Self::examine(pairs);
        problems.append(&mut examined.problems);
        Examined { problems, ..examined }
    }

    /// Reads settings from pairs of name and value; later ones win, empty values count as not set, other names
    /// are ignored.
    ///
    /// # Errors
    /// [`ConfigError`] if a setting is malformed or contradicts another.
    pub fn from_pairs(pairs: impl IntoIterator<Item = (String, String)>) -> Result<Self, ConfigError> {
        Self::examine(pairs).usable()
    }

    fn examine(pairs: impl IntoIterator<Item = (String, String)>) -> Examined {
        let mut settings = BTreeMap::new();
        for (name, value) in pairs {
            if is_ours(&name) && !value.is_empty() {
                settings.insert(name, value);
            }
        }
        let (settings, of_traces): (BTreeMap<_, _>, BTreeMap<_, _>) =
            settings.into_iter().partition(|(name, _)| name.starts_with(PREFIX));
        let read = |settings: Vec<_>| envy::prefixed(PREFIX).from_iter::<_, Config>(settings);
        let default = format!("{:?}", Config::default());
        let mut examined = Examined::default();
        let mut usable = Vec::new();
        // One by one, because envy does not always say which setting it stumbled over.
        for (name, value) in settings {
            match read(vec![(name.clone(), value.clone())]) {
                Ok(alone) => {
                    if format!("{alone:?}") != default {
                        let is_secret = name.ends_with("_TOKEN");
                        examined.changed.push((name.clone(), (!is_secret).then(|| value.clone())));
                    }
                    usable.push((name, value));
                }
                Err(error) => {
                    let hint = match name.as_str() {
                        "OPENCLAW_PROXY_LISTEN" => {
                            "; write an address and a port, such as 127.0.0.1:8000, or unix: and a path"
                        }
                        _ => "; .env.example shows what it may be",
                    };
                    examined.problems.push(format!("{name} is not usable: {error}{hint}."));
                }
            }
        }
        let names: Vec<String> = usable.iter().map(|(name, _)| name.clone()).collect();
        let mut config = match read(usable) {
            Ok(config) => config,
            Err(error) => {
                examined.problems.push(format!("The settings are not usable: {error}."));
                return examined;
            }
        };
        for list in [&mut config.allowed_hosts, &mut config.allowed_origins] {
            list.iter_mut().for_each(|item| *item = item.trim().to_owned());
            list.retain(|item| !item.is_empty());
        }
        config.check(&mut examined.problems);
        let is_setting = |name: &str| setting_names().contains(&name.to_ascii_lowercase().as_str());
        config.unknown = names.into_iter().filter(|name| !is_setting(&name[PREFIX.len()..])).collect();
        config.unknown.retain(|name| !OTHER_PROGRAMS.contains(&name.as_str()));
        config.tracing = trace::settings::read(&of_traces, &mut examined.problems);
        if config.tracing.is_some() {
            config.unused = trace::settings::unused(&of_traces);
        }
        let shown = |(name, value): (String, String)| {
            let value = (!trace::settings::is_secret(&name, &value)).then_some(value);
            (name, value)
        };
        let known = of_traces.into_iter().filter(|(name, _)| trace::settings::NAMES.contains(&name.as_str()));
        examined.changed.extend(known.map(shown));
        Examined { config, ..examined }
    }

    /// These settings for a server that listens elsewhere than they say.
    ///
    /// # Errors
    /// [`ConfigError`] if they are not safe there.
    pub fn listening_on(mut self, listen: Listen) -> Result<Self, ConfigError> {
        self.listen = listen;
        let mut problems = Vec::new();
        self.check(&mut problems);
        problems.into_iter().next().map_or(Ok(self), refuse)
    }

    /// The bounds of a registration.
    pub fn tool_limits(&self) -> ToolLimits {
        ToolLimits {
            tools: self.max_tools,
            tool_bytes: self.max_tool_bytes,
            tools_bytes: self.max_tools_bytes,
            param_headers: self.max_param_headers,
            instructions_bytes: self.max_instructions_bytes,
            json_depth: self.max_json_depth,
        }
    }

    /// The least that the bounds of bytes of requests may be: a call of an app that resumes is kept twice, as its
    /// request and as the frame that may be sent again.
    pub fn least_request_bytes(&self) -> usize {
        self.max_body_bytes.saturating_mul(2)
    }

    /// Whether a peer is a reverse proxy of ours.
    pub fn is_trusted(&self, ip: IpAddr) -> bool {
        self.trusted_proxies.iter().any(|network| network.contains(ip))
    }

    /// What the operator should know, though it is allowed.
    pub fn warnings(&self) -> Vec<String> {
        let mut warnings = Vec::new();
        let admin_token = self.admin_listen.map(|_| ("OPENCLAW_PROXY_ADMIN_TOKEN", &self.admin_token));
        for (name, token) in self.tokens().into_iter().chain(admin_token) {
            if token.is_empty() {
                let is_none = self.tenants_file.is_some() || name == "OPENCLAW_PROXY_ADMIN_TOKEN";
                if !is_none {
                    warnings.push(format!("{name} is empty: the endpoints that it guards ask for no token."));
                }
            } else if token.expose().len() < 16 || token.expose() == PLACEHOLDER {
                warnings.push(format!("{name} is easy to guess: use at least 16 random characters."));
            }
        }
        if let Some(files) = open_files_limit()
            && files < self.max_connections as u64
        {
            warnings.push(format!(
                "The process may open {files} files, fewer than OPENCLAW_PROXY_MAX_CONNECTIONS ({}): raise it (ulimit -n, LimitNOFILE), or lower the setting.",
                self.max_connections
            ));
        }
        warnings.extend(self.unknown.iter().map(|name| match nearest(name) {
            Some(known) => format!("{name} is set, but there is no such setting; {known} is meant, most likely."),
            None => format!("{name} is set, but there is no such setting; remove it."),
        }));
        let unused = self.unused.iter();
        warnings.extend(unused.map(|name| format!("{name} is set and does nothing here; .env.example has what does.")));
        if !self.app_token.is_empty() && self.app_token.expose() == self.openclaw_token.expose() {
            warnings.push("Both tokens are the same: an MCP client could register tools.".into());
        }
        warnings
    }

    /// The two tokens, with the names of their settings.
    pub(super) fn tokens(&self) -> [(&'static str, &Token); 2] {
        [("OPENCLAW_PROXY_APP_TOKEN", &self.app_token), ("OPENCLAW_PROXY_OPENCLAW_TOKEN", &self.openclaw_token)]
    }

    /// Every bound that has no smaller one of its own, and the most that it may be.
    fn bounds(&self) -> [(&'static str, usize, u64); 21] {
        [
            ("RECENT_CALLS", self.recent_calls, MOST_COUNT),
            ("MAX_TOOLS", self.max_tools, MOST_COUNT),
            ("MAX_TOOL_BYTES", self.max_tool_bytes, MOST_BYTES),
            ("MAX_TOOLS_BYTES", self.max_tools_bytes, MOST_BYTES),
            ("MAX_BODY_BYTES", self.max_body_bytes, MOST_BYTES),
            ("MAX_RESULT_BYTES", self.max_result_bytes, MOST_BYTES),
            ("MAX_PROGRESS_BYTES", self.max_progress_bytes, MOST_BYTES),
            ("MAX_BRIDGE_MESSAGE_BYTES", self.max_bridge_message_bytes, MOST_BYTES),
            ("MAX_QUEUE_BYTES", self.max_queue_bytes, MOST_BYTES),
            ("MAX_CALLS_PER_SESSION", self.max_calls_per_session, MOST_COUNT),
            ("MAX_CALLS_PER_TENANT", self.max_calls_per_tenant, MOST_COUNT),
            ("MAX_CALLS", self.max_calls, MOST_COUNT),
            ("MAX_CALL_BYTES_PER_SESSION", self.max_call_bytes_per_session, MOST_BYTES),
            ("MAX_REQUEST_BYTES_PER_TENANT", self.max_request_bytes_per_tenant, MOST_BYTES),
            ("MAX_REQUEST_BYTES", self.max_request_bytes, MOST_BYTES),
            ("MAX_LISTENERS_PER_SESSION", self.max_listeners_per_session, MOST_COUNT),
            ("MAX_SESSIONS_PER_TENANT", self.max_sessions_per_tenant, MOST_COUNT),
            ("MAX_SESSIONS", self.max_sessions, MOST_COUNT),
            ("MAX_BATCH", self.max_batch, MOST_COUNT),
            ("MAX_HEADER_BYTES", self.max_header_bytes, MOST_BYTES),
            ("MAX_CONNECTIONS", self.max_connections, MOST_COUNT),
        ]
    }

    fn check(&self, problems: &mut Vec<String>) {
        if let Some(address) = self.admin_listen
            && self.admin_token.is_empty()
            && !address.ip().is_loopback()
            && !self.allow_open
        {
            problems.push(format!(
                "{PREFIX}ADMIN_TOKEN is empty and {address} can be reached from other machines: set the token, set {PREFIX}ADMIN_LISTEN to 127.0.0.1, or set OPENCLAW_PROXY_ALLOW_OPEN=true."
            ));
        }
        for (name, token) in self.tokens() {
            // With a file of tenants, an empty token is none.
            if token.is_empty() && self.tenants_file.is_none() && !self.listen.is_local() && !self.allow_open {
                problems.push(format!(
                    "{name} is empty and {} can be reached from other machines: set the token, listen on 127.0.0.1, or set OPENCLAW_PROXY_ALLOW_OPEN=true.",
                    self.listen
                ));
            }
        }
        let admin_token = ("OPENCLAW_PROXY_ADMIN_TOKEN", &self.admin_token);
        let admin_listen = self.admin_listen.map_or_else(|| self.listen.clone(), Listen::Tcp);
        let listens = [self.listen.clone(), self.listen.clone(), admin_listen];
        for ((name, token), listen) in self.tokens().into_iter().chain([admin_token]).zip(listens) {
            if token.expose() == PLACEHOLDER && !listen.is_local() && !self.allow_open {
                problems.push(format!(
                    "{name} is still {PLACEHOLDER}, which everybody knows, and {listen} can be reached from other machines: set a token of your own ('openclaw-mcp-proxy token' makes one), listen on 127.0.0.1, or set OPENCLAW_PROXY_ALLOW_OPEN=true."
                ));
            }
            if token.expose().contains("${") {
                problems.push(format!("{name} holds a literal ${{…}}: a variable was not expanded; write its value."));
            }
            if !token.expose().bytes().all(|b| b.is_ascii_graphic()) {
                problems
                    .push(format!("{name} must consist of visible ASCII characters, so that a header can carry it."));
            }
        }
        for (name, value) in [
            ("SESSION_TTL_SECONDS", self.session_ttl),
            ("TOOL_TIMEOUT_SECONDS", self.tool_timeout),
            ("KEEP_ALIVE_SECONDS", self.keep_alive),
            ("PING_SECONDS", self.ping),
            ("PROBE_SECONDS", self.probe),
            ("WRITE_STALL_SECONDS", self.write_stall),
            ("MESSAGE_TIMEOUT_SECONDS", self.message_timeout),
            ("HEADER_TIMEOUT_SECONDS", self.header_timeout),
            ("IDLE_SECONDS", self.idle),
            ("BODY_IDLE_SECONDS", self.body_idle),
            ("BODY_TIMEOUT_SECONDS", self.body_timeout),
        ] {
            if value.0.is_zero() {
                problems.push(format!("{PREFIX}{name} must be more than 0."));
            }
        }
        for (name, value, least) in [
            ("MAX_TOOLS", self.max_tools, 1),
            ("MAX_CALLS_PER_SESSION", self.max_calls_per_session, 1),
            ("MAX_CALLS_PER_TENANT", self.max_calls_per_tenant, 1),
            ("MAX_CALLS", self.max_calls, 1),
            ("MAX_LISTENERS_PER_SESSION", self.max_listeners_per_session, 1),
            ("MAX_SESSIONS_PER_TENANT", self.max_sessions_per_tenant, 1),
            ("MAX_SESSIONS", self.max_sessions, 1),
            ("MAX_BATCH", self.max_batch, 1),
            ("MAX_CONNECTIONS", self.max_connections, 1),
            ("MAX_CONNECTIONS_PER_ADDRESS", self.max_connections_per_address, 1),
            ("MAX_ADMIN_CONNECTIONS", self.max_admin_connections, 1),
            ("MAX_BODY_BYTES", self.max_body_bytes, 1024),
            ("MAX_RESULT_BYTES", self.max_result_bytes, 1024),
            // hyper's read buffer cannot be smaller.
            ("MAX_HEADER_BYTES", self.max_header_bytes, 8192),
        ] {
            if value < least {
                problems.push(format!("{PREFIX}{name} is {value}; it must be at least {least}."));
            }
        }
        for (name, value, most) in self.bounds() {
            if value as u64 > most {
                problems.push(format!("{PREFIX}{name} is {value}; it must be at most {most}."));
            }
        }
        for (small_name, small, large_name, large) in [
            ("MAX_TOOL_BYTES", self.max_tool_bytes, "MAX_TOOLS_BYTES", self.max_tools_bytes),
            ("MAX_TOOLS_BYTES", self.max_tools_bytes, "MAX_BODY_BYTES", self.max_body_bytes),
            ("MAX_RESULT_BYTES", self.max_result_bytes, "MAX_BRIDGE_MESSAGE_BYTES", self.max_bridge_message_bytes),
            ("MAX_BODY_BYTES", self.max_body_bytes, "MAX_QUEUE_BYTES", self.max_queue_bytes),
        ] {
            if small > large {
                problems.push(format!(
                    "{PREFIX}{small_name} is {small}, more than {PREFIX}{large_name}, which is {large}; lower the one, or raise the other."
                ));
            }
        }
        let least = self.least_request_bytes();
        for (name, value) in [
            ("MAX_CALL_BYTES_PER_SESSION", self.max_call_bytes_per_session),
            ("MAX_REQUEST_BYTES_PER_TENANT", self.max_request_bytes_per_tenant),
            ("MAX_REQUEST_BYTES", self.max_request_bytes),
        ] {
            if value < least {
                problems.push(format!(
                    "{PREFIX}{name} is {value}; it must be at least {least}, twice {PREFIX}MAX_BODY_BYTES."
                ));
            }
        }
        if self.resume_grace.0 >= self.session_ttl.0 {
            problems.push(
                "OPENCLAW_PROXY_RESUME_GRACE_SECONDS must be less than OPENCLAW_PROXY_SESSION_TTL_SECONDS, or a session could end before its app may come back."
                    .to_owned(),
            );
        }
        if !(8..=json::MAX_DEPTH).contains(&self.max_json_depth) {
            let depth = self.max_json_depth;
            problems.push(format!("{PREFIX}MAX_JSON_DEPTH is {depth}; it must be from 8 to {}.", json::MAX_DEPTH));
        }
        let most = tokio::sync::Semaphore::MAX_PERMITS;
        let counted = [
            ("MAX_CONNECTIONS", self.max_connections),
            ("MAX_ADMIN_CONNECTIONS", self.max_admin_connections),
            ("MAX_REFUSED_SOCKETS", self.max_refused_sockets),
            ("MAX_LISTENERS_PER_SESSION", self.max_listeners_per_session),
        ];
        for (name, value) in counted {
            if value > most {
                problems.push(format!("{PREFIX}{name} is {value}; it must be at most {most}."));
            }
        }
        for host in &self.allowed_hosts {
            if host.contains([':', '/']) && !host.starts_with('[') {
                problems.push(format!(
                    "OPENCLAW_PROXY_ALLOWED_HOSTS holds '{host}': a host is written without scheme, port and path."
                ));
            }
        }
        for origin in &self.allowed_origins {
            if !origin.contains("://") || origin.ends_with('/') {
                problems.push(format!(
                    "OPENCLAW_PROXY_ALLOWED_ORIGINS holds '{origin}': an origin is written as scheme://host[:port]."
                ));
            }
        }
    }
}

impl Examined {
    fn usable(self) -> Result<Config, ConfigError> {
        match self.problems.into_iter().next() {
            None => Ok(self.config),
            Some(problem) => Err(ConfigError(problem)),
        }
    }
}

/// The setting whose name is most like this one, if one is.
fn nearest(name: &str) -> Option<String> {
    /// Below this, two names have only their prefix in common.
    const ALIKE: f64 = 0.8;
    let known = setting_names().iter().map(|name| name.to_ascii_uppercase());
    let likeness = |known: &str| strsim::jaro(known, &name[PREFIX.len()..].to_ascii_uppercase());
    let best = known.map(|known| (likeness(&known), known)).max_by(|a, b| a.0.total_cmp(&b.0))?;
    (best.0 >= ALIKE).then(|| format!("{PREFIX}{}", best.1))
}

/// How many files, and so connections, the process may have open at once; known on Linux.
fn open_files_limit() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    limits.lines().find_map(|line| line.strip_prefix("Max open files")?.split_whitespace().next()?.parse().ok())
}

/// The names of all settings, without their prefix, in lower case.
pub fn setting_names() -> &'static [&'static str] {
    /// Learns the names that a struct asks its deserializer for.
    struct Names<'a>(&'a mut &'static [&'static str]);
    impl<'de> Deserializer<'de> for Names<'_> {
        type Error = serde::de::value::Error;

        fn deserialize_any<V: serde::de::Visitor<'de>>(self, _: V) -> Result<V::Value, Self::Error> {
            Err(serde::de::Error::custom("only the names are wanted"))
        }

        fn deserialize_struct<V: serde::de::Visitor<'de>>(
            self,
            _: &'static str,
            fields: &'static [&'static str],
            visitor: V,
        ) -> Result<V::Value, Self::Error> {
            *self.0 = fields;
            self.deserialize_any(visitor)
        }

        serde::forward_to_deserialize_any! {
            bool i8 i16 i32 i64 u8 u16 u32 u64 f32 f64 char str string bytes byte_buf option unit unit_struct
            newtype_struct seq tuple tuple_struct map enum identifier ignored_any
        }
    }
    let mut names: &[&str] = &[];
    let _names_only = Config::deserialize(Names(&mut names));
    names
}

/// The pairs of a `.env` file; none if there is no file.
fn dot_env(path: &Path) -> Result<Vec<(String, String)>, ConfigError> {
    match dotenvy::from_path_iter(path) {
        Ok(_) if path.is_dir() => refuse(".env is a folder; it must be a file."),
        Ok(pairs) => {
            pairs.collect::<Result<_, _>>().or_else(|error| {
                // The parse error quotes the line, which may hold a token.
                let place = if let dotenvy::Error::LineParse(_, at) = error {
                    format!(" near column {at}")
                } else {
                    String::new()
                };
                refuse(format!(".env has a line that is not NAME=value{place}; correct it, or put a # in front of it."))
            })
        }
        Err(error) if error.not_found() => Ok(Vec::new()),
        Err(_) => refuse(".env exists but cannot be read; make it readable for the user that the proxy runs as."),
    }
}

/// A duration written as a number of seconds, fractions allowed.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Seconds(pub Duration);

impl Seconds {
    const fn new(seconds: u64) -> Self {
        Seconds(Duration::from_secs(seconds))
    }
}

impl<'de> Deserialize<'de> for Seconds {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let seconds = text.parse::<f64>().ok().and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
        // Beyond a century it is a mistake, and timers overflow.
        let seconds = seconds.filter(|seconds| *seconds < Duration::from_secs(3_200_000_000));
        seconds.map(Seconds).ok_or_else(|| serde::de::Error::custom(format!("'{text}' is not a number of seconds")))
    }
}

/// Whose closed connection cancels the call that was waiting on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum CancelOnDisconnect {
    /// Every client's: nobody is left to take the answer.
    All,
    /// Only that of clients from 2026-07-28 on, where the specification demands it.
    Modern,
}

/// `http(s)://host[:port][/prefix]`, without a slash at the end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PublicUrl {
    /// The whole.
    pub base: String,
    /// Its host, without the port, in lower case.
    pub host: String,
}

impl<'de> Deserialize<'de> for PublicUrl {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || serde::de::Error::custom(format!("'{text}' is not of the form https://host[:port][/prefix]"));
        let uri: http::Uri = text.parse().map_err(|_| wrong())?;
        let authority = uri.authority().ok_or_else(wrong)?;
        let is_plain = uri.query().is_none() && !text.contains(['#', '@']) && !authority.host().is_empty();
        if !matches!(uri.scheme_str(), Some("http" | "https")) || !is_plain {
            return Err(wrong());
        }
        Ok(PublicUrl { base: text.trim_end_matches('/').to_owned(), host: authority.host().to_ascii_lowercase() })
    }
}

/// An IP network in CIDR notation, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl Network {
    const fn loopback_v4() -> Self {
        Network { address: IpAddr::V4(std::net::Ipv4Addr::new(127, 0, 0, 0)), prefix: 8 }
    }

    const fn loopback_v6() -> Self {
        Network { address: IpAddr::V6(std::net::Ipv6Addr::LOCALHOST), prefix: 128 }
    }

    /// Whether `peer` belongs to the network. An IPv4 address mapped into IPv6 counts as IPv4.
    pub fn contains(&self, peer: IpAddr) -> bool {
        let bits = |address: IpAddr| match address {
            IpAddr::V4(v4) => (u128::from(v4.to_bits()) << 96, 32),
            IpAddr::V6(v6) => (v6.to_bits(), 128),
        };
        let ((network, width), (peer, peer_width)) = (bits(self.address), bits(peer.to_canonical()));
        let mask = u128::MAX.checked_shl(128 - u32::from(self.prefix)).unwrap_or(0);
        width == peer_width && (network ^ peer) & mask == 0
    }
}

impl<'de> Deserialize<'de> for Network {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let wrong = || serde::de::Error::custom(format!("'{text}' is not an address or a network such as 10.0.0.0/8"));
        let (address, prefix) = text.trim().split_once('/').map_or((text.trim(), None), |(a, p)| (a, Some(p)));
        let address: IpAddr = address.parse().map_err(|_| wrong())?;
        let width = if address.is_ipv4() { 32 } else { 128 };
        let prefix = prefix.map_or(Ok(width), |prefix| prefix.parse().map_err(|_| wrong()))?;
        if prefix > width {
            return Err(wrong());
        }
        Ok(Network { address, prefix })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(pairs: &[(&str, &str)]) -> Result<Config, String> {
        let pairs = pairs.iter().map(|(name, value)| (format!("{PREFIX}{name}"), (*value).to_owned()));
        Config::from_pairs(pairs).map_err(|error| error.to_string())
    }

    #[test]
    fn the_seeds_five_settings_have_the_seeds_defaults() {
        // The fifth, OPENCLAW_PROXY_SERVER_URL, belongs to the stdio program.
        let defaults = config(&[("SESSION_TTL_SECONDS", ""), ("SERVER_URL", "http://x")]).unwrap();
        assert!(defaults.app_token.is_empty() && defaults.openclaw_token.is_empty());
        assert_eq!(defaults.session_ttl.0, Duration::from_secs(300));
        assert_eq!(defaults.tool_timeout.0, Duration::from_secs(120));
        assert_eq!(defaults.listen.to_string(), "127.0.0.1:8000");
    }

    #[test]
    fn an_empty_token_needs_loopback_or_an_explicit_word() {
        let both = [("APP_TOKEN", "a"), ("OPENCLAW_TOKEN", "b")];
        for listen in ["127.0.0.1:1", "[::1]:1", "unix:/a/b", "0.0.0.0:1", "10.0.0.1:1"] {
            if cfg!(not(unix)) && listen.starts_with("unix:") {
                continue;
            }
            let outside = listen.starts_with("0.0.0.0") || listen.starts_with("10.");
            for tokens in [&both[..0], &both[..1], &both[1..], &both[..]] {
                for open in [false, true] {
                    let mut pairs = tokens.to_vec();
                    pairs.extend([("LISTEN", listen), ("ALLOW_OPEN", if open { "true" } else { "false" })]);
                    let refused = outside && !open && tokens.len() < 2;
                    let result = config(&pairs);
                    assert_eq!(result.is_err(), refused, "{pairs:?}");
                    if let Err(error) = result {
                        assert!(error.contains("OPENCLAW_PROXY_ALLOW_OPEN") && error.contains("TOKEN is empty"));
                    }
                }
            }
        }
    }

    #[test]
    fn the_token_of_the_example_does_for_loopback_alone() {
        for (name, listens) in [("APP_TOKEN", "LISTEN"), ("OPENCLAW_TOKEN", "LISTEN"), ("ADMIN_TOKEN", "ADMIN_LISTEN")]
        {
            let with = |listen: &str, open: &str| {
                config(&[
                    ("APP_TOKEN", "0123456789abcdef"),
                    ("OPENCLAW_TOKEN", "fedcba9876543210"),
                    (listens, listen),
                    (name, "replace-me"),
                    ("ALLOW_OPEN", open),
                ])
            };
            let error = with("0.0.0.0:1", "false").unwrap_err();
            assert!(error.contains(&format!("OPENCLAW_PROXY_{name} is still replace-me")), "{error}");
            assert!(with("0.0.0.0:1", "true").is_ok());
            let warnings = with("127.0.0.1:1", "false").unwrap().warnings();
            assert!(warnings.iter().any(|warning| warning.contains(name) && warning.contains("guess")), "{warnings:?}");
        }
    }

    #[test]
    fn unusable_settings_are_named() {
        for (name, value, says) in [
            ("LISTEN", "localhost", "LISTEN"),
            ("MAX_TOOLS", "many", "MAX_TOOLS"),
            ("MAX_TOOLS", "0", "MAX_TOOLS"),
            ("TOOL_TIMEOUT_SECONDS", "-1", "TOOL_TIMEOUT_SECONDS"),
            ("TOOL_TIMEOUT_SECONDS", "0", "TOOL_TIMEOUT_SECONDS"),
            ("SESSION_TTL_SECONDS", "1e99", "SESSION_TTL_SECONDS"),
            ("MAX_JSON_DEPTH", "129", "MAX_JSON_DEPTH"),
            ("RESUME_GRACE_SECONDS", "300", "SESSION_TTL_SECONDS"),
            ("MAX_RESULT_BYTES", "99999999999", "MAX_BRIDGE_MESSAGE_BYTES"),
            ("MAX_BODY_BYTES", "9999999", "MAX_QUEUE_BYTES"),
            ("MAX_CALL_BYTES_PER_SESSION", "8388607", "at least 8388608, twice OPENCLAW_PROXY_MAX_BODY_BYTES"),
            ("ADMIN_LISTEN", "0.0.0.0:1", "OPENCLAW_PROXY_ADMIN_TOKEN is empty"),
            ("ADMIN_TOKEN", "a b", "ADMIN_TOKEN"),
            ("MAX_REQUEST_BYTES_PER_TENANT", "8388607", "at least 8388608, twice OPENCLAW_PROXY_MAX_BODY_BYTES"),
            ("MAX_REQUEST_BYTES", "8388607", "at least 8388608, twice OPENCLAW_PROXY_MAX_BODY_BYTES"),
            ("PUBLIC_URL", "example.com", "PUBLIC_URL"),
            ("PUBLIC_URL", "ftp://example.com", "PUBLIC_URL"),
            ("PUBLIC_URL", "https://u:p@example.com", "PUBLIC_URL"),
            ("PUBLIC_URL", "https://example.com/?x", "PUBLIC_URL"),
            ("TRUSTED_PROXIES", "10.0.0.0/33", "TRUSTED_PROXIES"),
            ("ALLOWED_ORIGINS", "example.com", "ALLOWED_ORIGINS"),
            ("ALLOW_OPEN", "yes", "ALLOW_OPEN"),
            ("LISTEN", "localhost:8000", "such as 127.0.0.1:8000"),
            ("LISTEN", "unix:", "names no Unix socket"),
            ("ALLOWED_HOSTS", "mcp.example:443", "ALLOWED_HOSTS"),
            ("MAX_CONNECTIONS", "18446744073709551615", "MAX_CONNECTIONS"),
            ("MAX_SESSIONS", "9223372036854775808", "at most 1000000000"),
            ("MAX_REQUEST_BYTES", "9223372036854775808", "at most 1099511627776"),
            ("CANCEL_ON_DISCONNECT", "never", "CANCEL_ON_DISCONNECT"),
            ("APP_TOKEN", "a b", "APP_TOKEN"),
            ("OPENCLAW_TOKEN", "${X}", "OPENCLAW_TOKEN"),
        ] {
            let error = config(&[(name, value)]).expect_err(name);
            assert!(error.contains(says), "{name}={value}: {error}");
            assert!(!error.contains('\n') && error.ends_with('.'), "{error}");
        }
    }

    #[test]
    fn lists_are_comma_separated() {
        let config =
            config(&[("TRUSTED_PROXIES", "10.0.0.0/8,::1"), ("ALLOWED_HOSTS", "a.example, b.example")]).unwrap();
        assert_eq!(config.allowed_hosts, ["a.example", "b.example"]);
        let trusts = |peer: &str| config.trusted_proxies.iter().any(|n| n.contains(peer.parse().unwrap()));
        assert!(trusts("10.255.0.1") && trusts("::1") && trusts("::ffff:10.0.0.1"));
        assert!(!trusts("11.0.0.1") && !trusts("127.0.0.1") && !trusts("::2"));
    }

    #[test]
    fn a_public_url_may_have_a_port_and_a_prefix() {
        let url = |text| config(&[("PUBLIC_URL", text)]).unwrap().public_url.unwrap();
        assert_eq!(url("https://Example.com:8443/mcp/").base, "https://Example.com:8443/mcp");
        assert_eq!(url("https://Example.com:8443/mcp/").host, "example.com");
    }

    #[test]
    fn the_example_shows_every_setting_with_its_default() {
        let example = include_str!("../../.env.example");
        let lines = || example.lines().filter_map(|line| line.trim_start_matches("# ").split_once('='));
        let shown: Vec<&str> = lines().map(|(name, _)| name).collect();
        for name in setting_names() {
            let name = format!("{PREFIX}{}", name.to_ascii_uppercase());
            assert_eq!(shown.iter().filter(|shown| **shown == name).count(), 1, "{name} in .env.example");
        }
        for name in trace::settings::NAMES {
            assert_eq!(shown.iter().filter(|shown| **shown == name).count(), 1, "{name} in .env.example");
        }
        let pairs = lines().filter(|(name, _)| is_ours(name) && !name.ends_with("_TOKEN"));
        let config = Config::from_pairs(pairs.map(|(name, value)| (name.to_owned(), value.to_owned()))).unwrap();
        assert_eq!(format!("{config:?}"), format!("{:?}", Config::default()));
    }

    #[test]
    fn a_misspelt_setting_is_pointed_out() {
        let warnings = config(&[("TOOL_TIMOUT_SECONDS", "9"), ("SERVER_URL", "http://x")]).unwrap().warnings();
        assert_eq!(warnings.iter().filter(|warning| warning.contains("no such setting")).count(), 1);
        assert!(warnings.iter().any(|warning| warning.contains("OPENCLAW_PROXY_TOOL_TIMOUT_SECONDS")));
    }

    #[test]
    fn no_setting_shows_a_token() {
        let config = config(&[("APP_TOKEN", "canary-1"), ("OPENCLAW_TOKEN", "canary-2")]).unwrap();
        assert!(!format!("{config:?} {:?}", config.warnings()).contains("canary"));
    }
}
