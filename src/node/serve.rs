//! `openclaw-node serve`: this computer's capabilities for clients on it, over a bridge, or both.
//!
//! The two transports are two switches and know nothing of each other. One that cannot work is told in the status
//! and in the log, and the other one goes on; the node ends when none is left.

mod desktop;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::approvals::location::Location;
use super::bridge_client::{BridgeClient, BridgeError, Options, Session, State};
use super::capabilities::Registry;
use super::lend::host_name;
use super::lender::RegistryLender;
use super::local_mcp::{self, DEFAULT_PORT, Server};
use super::settings::{self, Settings, SettingsError};
use super::status::{Bridge, LocalMcp, Status};
use super::token::{self, Identity};
use super::{Setup, announce, registry};
use crate::auth::Token;
use desktop::DesktopArgs;

/// The flags of `openclaw-node serve`.
#[derive(Debug, Args)]
pub struct ServeArgs {
    /// Whether the local MCP server runs [default: as settings.json says, else on]
    #[arg(long, value_name = "on|off", env = "OPENCLAW_NODE_LOCAL_MCP")]
    local_mcp: Option<Switch>,
    /// Whether tools are lent over a bridge [default: as settings.json says, else on if a proxy is named]
    #[arg(long, value_name = "on|off", env = "OPENCLAW_NODE_BRIDGE")]
    bridge: Option<Switch>,
    /// The port of the local MCP server on 127.0.0.1; 0 takes any that is free
    #[arg(long, value_name = "PORT", env = "OPENCLAW_MCP_PORT", default_value_t = DEFAULT_PORT)]
    mcp_port: u16,
    /// The most local requests that are worked on at once; further ones are refused
    #[arg(long, value_name = "N", env = "OPENCLAW_MCP_MAX_REQUESTS", default_value_t = 8, value_parser = at_least_one())]
    mcp_max_requests: usize,
    /// The most bytes of a local request
    #[arg(long, value_name = "BYTES", env = "OPENCLAW_MCP_MAX_BODY_BYTES", default_value_t = 4 * 1024 * 1024, value_parser = at_least_one())]
    mcp_max_body_bytes: usize,
    /// How many seconds a local request may take
    #[arg(long, value_name = "SECONDS", env = "OPENCLAW_MCP_DEADLINE_SECONDS", default_value_t = 360, value_parser = clap::value_parser!(u64).range(1..))]
    mcp_deadline_seconds: u64,
    /// How many seconds the head of a local request may take
    #[arg(long, value_name = "SECONDS", env = "OPENCLAW_MCP_HEAD_TIMEOUT_SECONDS", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..))]
    mcp_head_timeout_seconds: u64,
    /// How many seconds the body of a local request may pause
    #[arg(long, value_name = "SECONDS", env = "OPENCLAW_MCP_BODY_PAUSE_SECONDS", default_value_t = 15, value_parser = clap::value_parser!(u64).range(1..))]
    mcp_body_pause_seconds: u64,
    /// The proxy's base URL [default: http://127.0.0.1:8000]
    #[arg(long, value_name = "URL", env = "OPENCLAW_PROXY_SERVER_URL")]
    proxy_url: Option<String>,
    /// The proxy's token for apps; better set in the environment, since everybody can see arguments
    #[arg(long, value_name = "TOKEN", env = "OPENCLAW_PROXY_APP_TOKEN", hide_env_values = true, default_value = "")]
    app_token: String,
    /// How the proxy knows this computer [default: its host name]
    #[arg(long, value_name = "ID", env = "OPENCLAW_NODE_DEVICE_ID")]
    device_id: Option<String>,
    /// How people know it [default: its host name]
    #[arg(long, value_name = "NAME", env = "OPENCLAW_NODE_DEVICE_NAME")]
    device_name: Option<String>,
    /// Lend over the bridge also tools with names like this, such as 'system.run*', 'camera.*' or 'screen.record'; * and
    /// ? stand for other characters; may be repeated
    #[arg(long, value_name = "GLOB", env = "OPENCLAW_NODE_LEND", value_delimiter = ',')]
    lend: Vec<String>,
    /// Do not lend tools with names like this over the bridge; may be repeated
    #[arg(long, value_name = "GLOB", env = "OPENCLAW_NODE_WITHHOLD", value_delimiter = ',')]
    withhold: Vec<String>,
    /// The most calls over the bridge that run at once; further ones are told to retry
    #[arg(long, value_name = "N", env = "OPENCLAW_NODE_MAX_CALLS", default_value_t = 8, value_parser = at_least_one())]
    max_calls: usize,
    /// Print what listens and each session as a line of JSON
    #[arg(long)]
    json: bool,
    /// What the capabilities are made of.
    #[command(flatten)]
    desktop: DesktopArgs,
}

fn at_least_one() -> impl clap::builder::TypedValueParser<Value = usize> {
    clap::builder::RangedU64ValueParser::<usize>::new().range(1..)
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Switch {
    On,
    Off,
}

/// Why the node ended.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// Its folder is not known.
    #[error(
        "The folder of the node's files is not known: neither HOME (on Windows, APPDATA) nor OPENCLAW_TRAY_DATA_DIR is set."
    )]
    NoFolder,
    /// OPENCLAW_APP_IDENTITY is something else.
    #[error("OPENCLAW_APP_IDENTITY must be release or dev.")]
    Identity,
    /// The settings.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// Everything is switched off.
    #[error("Nothing is to be served: both the local MCP server and the bridge are switched off.")]
    NothingToDo,
    /// The local MCP server is off, and it is not said where to lend.
    #[error(
        "Nothing is to be served: the local MCP server is switched off, and no proxy is named (--proxy-url or OPENCLAW_PROXY_SERVER_URL)."
    )]
    NoProxy,
    /// The local MCP server, and there is no bridge.
    #[error("{0}")]
    LocalMcp(String),
    /// The bridge, and there is no local MCP server.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
}

impl ServeError {
    /// Whether something is wrong with the settings, so that trying again does not help.
    pub fn is_config(&self) -> bool {
        match self {
            ServeError::Bridge(error) => error.is_config(),
            ServeError::LocalMcp(_) => false,
            _ => true,
        }
    }
}

/// The folder of the node's files, as the environment says.
///
/// # Errors
/// [`ServeError`] if there is none.
pub fn folder() -> Result<PathBuf, ServeError> {
    let env = |name: &str| std::env::var(name).ok();
    let identity = match env("OPENCLAW_APP_IDENTITY").filter(|name| !name.trim().is_empty()) {
        None => Identity::Release,
        Some(name) => Identity::parse(name.trim()).ok_or(ServeError::Identity)?,
    };
    token::folder(identity, env).ok_or(ServeError::NoFolder)
}

/// Serves until `stop`; what listens and each session is told to `out`.
///
/// # Errors
/// [`ServeError`] if neither transport can go on.
pub async fn serve(args: ServeArgs, out: &mut impl Write, stop: CancellationToken) -> Result<(), ServeError> {
    let folder = folder()?;
    let settings = Settings::load(&folder.join(settings::FILE_NAME))?;
    let on = |flag: Option<Switch>, name, default| -> Result<bool, SettingsError> {
        Ok(flag.map(|switch| switch == Switch::On).or(settings.switch(name)?).unwrap_or(default))
    };
    let local_is_on = on(args.local_mcp, settings::LOCAL_MCP, true)?;
    let bridge_is_on = on(args.bridge, settings::BRIDGE, args.proxy_url.is_some())?;
    let settings_bridge = settings.switch(settings::BRIDGE)?;
    let status = Arc::new(Status::default());
    let mut setup = Setup {
        settings,
        status: Arc::clone(&status),
        approvals: Location::new(&folder, |name| std::env::var(name).ok()),
        ..Setup::in_folder(&folder)
    };
    args.desktop.apply(&mut setup, bridge_is_on);
    let registry = Arc::new(registry(setup));

    let (options, lender) = (bridge_options(&args), Arc::new(lender(&args, &registry)));
    if bridge_is_on {
        // What can never work is said before anything is started.
        BridgeClient::new(options.clone(), Arc::clone(&lender))?;
    }
    let mut local = None;
    if local_is_on {
        match start_local_mcp(&args, &folder.join(token::FILE_NAME), Arc::clone(&registry)).await {
            Ok((server, listener, token_file)) => {
                let address = listener.local_addr().map_err(|error| ServeError::LocalMcp(error.to_string()))?;
                tracing::info!(url = %format!("http://{address}/"), "the local MCP server listens");
                status.set_local_mcp(LocalMcp::Listening(address));
                let text = if args.json {
                    json!({ "local_mcp_url": format!("http://{address}/"), "token_file": token_file }).to_string()
                } else {
                    format!("Local MCP server: http://{address}/, with the token in {}", token_file.display())
                };
                // Whoever closed our stdout does not want to know.
                let _closed = writeln!(out, "{text}").and_then(|()| out.flush());
                local = Some((server, listener));
            }
            Err(why) if bridge_is_on => {
                tracing::error!("{why}");
                status.set_local_mcp(LocalMcp::Failed(why));
            }
            Err(why) => return Err(ServeError::LocalMcp(why)),
        }
    }
    if local.is_none() && !bridge_is_on {
        let no_proxy = args.proxy_url.is_none() && args.bridge.is_none() && settings_bridge.is_none();
        return Err(if no_proxy { ServeError::NoProxy } else { ServeError::NothingToDo });
    }
    let is_alone = local.is_none();
    let local = async {
        if let Some((server, listener)) = local {
            server.listen(listener, stop.clone()).await;
            status.set_local_mcp(LocalMcp::Stopped);
        }
    };
    let bridge = async {
        if !bridge_is_on {
            return Ok(());
        }
        let lend = keep_lending(&args, options, &lender, &status, is_alone, out, &stop);
        // Ends with the bridge, not with the node: calls that still run may be the last.
        let ended = CancellationToken::new();
        let lend = async {
            let result = lend.await;
            ended.cancel();
            result
        };
        tokio::join!(lend, lender.keep_fresh(&ended)).0
    };
    let ((), bridge) = tokio::join!(local, bridge);
    Ok(bridge?)
}

async fn start_local_mcp(
    args: &ServeArgs,
    token_file: &Path,
    registry: Arc<Registry>,
) -> Result<(Server, tokio::net::TcpListener, PathBuf), String> {
    let token = token::load_or_create(token_file)
        .map_err(|error| format!("The token file {} cannot be used: {error}.", token_file.display()))?;
    if let Some(looseness) = token::looseness(token_file) {
        tracing::warn!(file = %token_file.display(), "{looseness}");
    }
    let listener = Server::bind(args.mcp_port).await.map_err(|error| {
        format!(
            "The local MCP server cannot listen on 127.0.0.1:{}: {error}. Stop the program that does, or set OPENCLAW_MCP_PORT.",
            args.mcp_port
        )
    })?;
    let config = local_mcp::Config {
        token,
        token_file: Some(token_file.to_owned()),
        max_requests: args.mcp_max_requests,
        max_body_bytes: args.mcp_max_body_bytes,
        deadline: Duration::from_secs(args.mcp_deadline_seconds),
        head_timeout: Duration::from_secs(args.mcp_head_timeout_seconds),
        body_pause: Duration::from_secs(args.mcp_body_pause_seconds),
        ..local_mcp::Config::default()
    };
    Ok((Server::new(config, registry), listener, token_file.to_owned()))
}

fn lender(args: &ServeArgs, registry: &Arc<Registry>) -> RegistryLender {
    let session_key = format!("bridge:{}", args.device_id.clone().unwrap_or_else(host_name));
    RegistryLender::new(Arc::clone(registry), &args.lend, &args.withhold, session_key)
}

fn bridge_options(args: &ServeArgs) -> Options {
    let name = args.device_name.clone().unwrap_or_else(host_name);
    Options {
        proxy_url: args.proxy_url.clone().unwrap_or_else(|| "http://127.0.0.1:8000".into()),
        token: Token::new(args.app_token.clone()),
        device_id: args.device_id.clone().unwrap_or_else(host_name),
        device_name: Some(name.clone()),
        instructions: Some(format!("Tools of the computer {name}.")),
        max_calls: args.max_calls,
    }
}

/// Lends until `stop`. If that cannot go on and there is another transport, it waits to be told to try again.
async fn keep_lending(
    args: &ServeArgs,
    options: Options,
    lender: &Arc<RegistryLender>,
    status: &Status,
    is_alone: bool,
    out: &mut impl Write,
    stop: &CancellationToken,
) -> Result<(), BridgeError> {
    let name = options.device_name.clone().unwrap_or_default();
    loop {
        status.set_bridge(Bridge::Connecting);
        let tell = |session: &Session| {
            status.set_mcp_url(Some(session.mcp_url.clone()));
            let text = if args.json { announce::as_json(session) } else { announce::for_people(session, &name) };
            let _closed = writeln!(out, "{text}").and_then(|()| out.flush());
        };
        let ended = lend_once(options.clone(), Arc::clone(lender), status, tell, stop).await;
        status.set_mcp_url(None);
        match ended {
            Ok(()) => {
                status.set_bridge(Bridge::Stopped);
                return Ok(());
            }
            Err(error) if is_alone => return Err(error),
            Err(error) => {
                tracing::error!(
                    "the bridge has ended: {error} Once that is mended, 'winnode --command app.connection.reconnect' or \
                     a restart of the node opens it again."
                );
                status.set_bridge(Bridge::Failed(error.to_string()));
                if stop.run_until_cancelled(status.reconnect.notified()).await.is_none() {
                    return Ok(());
                }
            }
        }
    }
}

/// Lends with one client of the proxy, which shows its state and connects again when it is told to.
async fn lend_once(
    options: Options,
    lender: Arc<RegistryLender>,
    status: &Status,
    tell: impl FnMut(&Session),
    stop: &CancellationToken,
) -> Result<(), BridgeError> {
    let client = BridgeClient::new(options, lender)?;
    let mut state = client.state();
    let follow = async {
        loop {
            tokio::select! {
                () = status.reconnect.notified() => client.reconnect(),
                Ok(()) = state.changed() => {
                    let state = state.borrow_and_update().clone();
                    if state == State::Unregistered {
                        status.set_mcp_url(None);
                    }
                    status.set_bridge(match state {
                        State::Unregistered | State::Connecting => Bridge::Connecting,
                        State::Connected => Bridge::Connected,
                        State::Waiting(why) => Bridge::Waiting(why),
                    });
                }
            }
        }
    };
    tokio::select! {
        ended = client.run(tell, stop) => ended,
        () = follow => Ok(()),
    }
}
