//! `openclaw-node lend`: lends the tools of an MCP server that already exists over a bridge.
//!
//! [`lend`] starts the server or connects to it, registers its tools and stays until it is told to stop.

use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;

use clap::Args;
use http::Uri;
use tokio_util::sync::CancellationToken;

use super::announce;
use super::bridge_client::{BridgeClient, BridgeError, Options, Session};
use super::filter::Filter;
use super::upstream::{Source, Upstream};
use crate::auth::Token;

/// The flags of `openclaw-node lend`.
#[derive(Debug, Args)]
pub struct LendArgs {
    /// The URL of the MCP server to lend
    #[arg(long, value_name = "URL", required_unless_present = "command", conflicts_with = "command")]
    mcp_url: Option<Uri>,
    /// A file with that server's bearer token; read again when the server refuses the token
    #[arg(long, value_name = "FILE", requires = "mcp_url")]
    mcp_token_file: Option<PathBuf>,
    /// The proxy's base URL
    #[arg(long, value_name = "URL", env = "OPENCLAW_PROXY_SERVER_URL", default_value = "http://127.0.0.1:8000")]
    proxy_url: String,
    /// The proxy's token for apps; better set in the environment, since everybody can see arguments
    #[arg(long, value_name = "TOKEN", env = "OPENCLAW_PROXY_APP_TOKEN", hide_env_values = true, default_value = "")]
    app_token: String,
    /// How the proxy knows this computer [default: its host name]
    #[arg(long, value_name = "ID")]
    device_id: Option<String>,
    /// How people know what is lent [default: the server's name]
    #[arg(long, value_name = "NAME")]
    device_name: Option<String>,
    /// Lend only tools with names like this; * and ? stand for other characters; may be repeated
    #[arg(long, value_name = "GLOB")]
    include: Vec<String>,
    /// Do not lend tools with names like this; may be repeated
    #[arg(long, value_name = "GLOB")]
    exclude: Vec<String>,
    /// The most calls that run at once; further ones are told to retry
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::builder::RangedU64ValueParser::<usize>::new().range(1..))]
    max_calls: usize,
    /// Print each session as a line of JSON
    #[arg(long)]
    json: bool,
    /// The MCP server to start, and its arguments
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

impl From<LendArgs> for Lend {
    fn from(args: LendArgs) -> Self {
        let source = match (args.mcp_url, args.command.split_first()) {
            (Some(uri), _) => Source::Url { uri, token_file: args.mcp_token_file },
            (None, command) => {
                let (program, rest) =
                    command.map_or((String::new(), &[][..]), |(program, rest)| (program.clone(), rest));
                Source::Command { program, args: rest.to_vec() }
            }
        };
        Lend {
            source,
            filter: Filter { include: args.include, exclude: args.exclude },
            bridge: Options {
                proxy_url: args.proxy_url,
                token: Token::new(args.app_token),
                device_id: args.device_id.unwrap_or_else(host_name),
                device_name: args.device_name,
                instructions: None,
                max_calls: args.max_calls,
            },
            json: args.json,
        }
    }
}

/// What is lent, to which proxy.
#[derive(Debug)]
pub struct Lend {
    /// The server.
    pub source: Source,
    /// Which of its tools.
    pub filter: Filter,
    /// The proxy, and how the device is called. Without instructions, the server's own are told.
    pub bridge: Options,
    /// Sessions are printed as JSON, one a line.
    pub json: bool,
}

/// Why lending ended.
#[derive(Debug, thiserror::Error)]
pub enum LendError {
    /// The server.
    #[error("{0}")]
    Upstream(String),
    /// The bridge.
    #[error(transparent)]
    Bridge(#[from] BridgeError),
}

impl LendError {
    /// Whether something is wrong with the settings, so that trying again does not help.
    pub fn is_config(&self) -> bool {
        matches!(self, LendError::Bridge(error) if error.is_config())
    }
}

/// Lends until `stop`; each session that is registered is told to `out`.
///
/// # Errors
/// [`LendError`] if it cannot go on.
pub async fn lend(lend: Lend, out: &mut impl Write, stop: CancellationToken) -> Result<(), LendError> {
    // The server outlives the bridge: calls that still run are to end well.
    let stop_upstream = CancellationToken::new();
    let starting = Upstream::start(lend.source, lend.filter, stop_upstream.clone());
    let Some(started) = stop.run_until_cancelled(starting).await else { return Ok(()) };
    let (upstream, about, running) = started.map_err(LendError::Upstream)?;
    let mut options = lend.bridge;
    options.device_name = options.device_name.or(about.title).or_else(|| about.name.clone());
    options.instructions = options.instructions.or(about.instructions);
    let name = about.name.as_deref().unwrap_or(&options.device_id).to_owned();
    let ended = match BridgeClient::new(options, Arc::clone(&upstream)) {
        Err(error) => Err(error),
        Ok(client) => {
            let tell = |session: &Session| {
                let text = if lend.json { announce::as_json(session) } else { announce::for_people(session, &name) };
                // Whoever closed our stdout does not want to know.
                let _closed = writeln!(out, "{text}").and_then(|()| out.flush());
            };
            client.run(tell, &stop).await
        }
    };
    stop_upstream.cancel();
    let _panicked = running.await;
    Ok(ended?)
}

/// The name of this computer, as its owner knows it.
pub fn host_name() -> String {
    let said = || {
        let output = std::process::Command::new("hostname").stdin(std::process::Stdio::null()).output().ok()?;
        String::from_utf8(output.stdout).ok()
    };
    let candidates: [&dyn Fn() -> Option<String>; 4] = [
        &|| std::env::var("COMPUTERNAME").ok(),
        &|| std::fs::read_to_string("/proc/sys/kernel/hostname").ok(),
        &said,
        &|| std::env::var("HOSTNAME").ok(),
    ];
    let names = candidates.iter().filter_map(|candidate| candidate()).map(|name| name.trim().to_owned());
    names.into_iter().find(|name| !name.is_empty()).unwrap_or_else(|| "openclaw-node".into())
}
