//! The proxy's program: reads the settings, listens, serves until it is told to stop.

use std::io::{self, Write};
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use clap::{Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use openclaw_mcp_proxy::auth::{Token, TokenHash, new_token};
use openclaw_mcp_proxy::demo::Demo;
use openclaw_mcp_proxy::doctor::{self, Base};
use openclaw_mcp_proxy::process::{self, Audit, systemd};
use openclaw_mcp_proxy::proxy::config::Config;
use openclaw_mcp_proxy::proxy::listener::{Listen, Listener};
use openclaw_mcp_proxy::proxy::start::{self, StartError};
use openclaw_mcp_proxy::proxy::{Reload, Server};

/// Lends an app's tools to OpenClaw and any other MCP client. Settings are OPENCLAW_PROXY_* environment variables.
#[derive(Parser)]
#[command(version = process::VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Subcommand)]
enum Command {
    /// Serve (what happens without a command, too).
    Serve,
    /// Serve, and show the whole way: an app lends a tool, an MCP client calls it.
    Demo {
        /// Stop after the call.
        #[arg(long)]
        once: bool,
    },
    /// Print a new token and its hash, for the settings or for a file of tenants.
    Token,
    /// Ask the proxy that runs with these settings whether it is well; the exit code says.
    Health,
    /// Print what a shell needs to complete this program's commands and flags.
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Read every setting and every file that they name, as a start would, and say all that is wrong; 78 if there is
    /// something.
    CheckConfig,
    /// Examine a deployment from outside, and say what is wrong and which line mends it; 1 if there is a problem.
    Doctor(DoctorArgs),
}

/// The tokens are those of the environment or .env, as for the server; arguments could be seen by everybody.
#[derive(Args)]
struct DoctorArgs {
    /// The public base URL [default: OPENCLAW_PROXY_PUBLIC_URL, else where the settings say that the proxy listens]
    #[arg(long)]
    url: Option<String>,
    /// A file with the token of apps
    #[arg(long, value_name = "FILE")]
    app_token_file: Option<PathBuf>,
    /// A file with the token of MCP clients
    #[arg(long, value_name = "FILE")]
    openclaw_token_file: Option<PathBuf>,
    /// How long a bridge is left silent, and a call takes [default: 8, thorough: 75; at most 110]
    #[arg(long, value_name = "SECONDS")]
    idle: Option<f64>,
    /// Wait for longer than the 60 seconds after which many fronts cut what is silent
    #[arg(long)]
    thorough: bool,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// EX_CONFIG of sysexits.h: something is wrong with the settings, and trying again does not help.
const EXIT_CONFIG: u8 = 78;
/// How long the proxy may take to say that it is well.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the last lines of the audit log may take to be written.
const AUDIT_GRACE: Duration = Duration::from_secs(2);
/// How long threads may take to end that wait for a disk or a name; the process ends without them.
const THREAD_GRACE: Duration = Duration::from_secs(1);

fn main() -> ExitCode {
    let command = Cli::parse().command.unwrap_or(Command::Serve);
    let ended = tokio::runtime::Runtime::new().context("cannot start").and_then(|runtime| {
        let ended = runtime.block_on(run(command));
        runtime.shutdown_timeout(THREAD_GRACE);
        ended
    });
    match ended {
        Ok(code) => code,
        Err(error) => {
            let is_config = matches!(error.downcast_ref(), Some(StartError::Config(_)));
            process::last_words(&format!("openclaw-mcp-proxy: {error:#}"));
            ExitCode::from(if is_config { EXIT_CONFIG } else { 1 })
        }
    }
}

async fn run(command: Command) -> anyhow::Result<ExitCode> {
    let out = &mut io::stdout();
    match command {
        Command::Serve => {
            // Before anything that takes time: until then the signal ends the process.
            let hangups = hangups().context("cannot listen to signals")?;
            let (config, listener) = settings()?;
            serve(config, listener, Wanted::Serving(hangups)).await?;
        }
        Command::Demo { once } => serve(config()?, None, Wanted::Demo { once }).await?,
        Command::Token => print_token(out)?,
        Command::Health => health(&config()?).await?,
        Command::Completions { shell } => process::print_completions(Cli::command(), shell, out)?,
        Command::CheckConfig => {
            if !start::check(Config::examine_env(), out)? {
                return Ok(ExitCode::from(EXIT_CONFIG));
            }
        }
        Command::Doctor(args) => {
            if !doctor(args, config()?, out).await? {
                return Ok(ExitCode::FAILURE);
            }
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn config() -> Result<Config, StartError> {
    Config::from_env().map_err(|error| StartError::Config(error.to_string()))
}

/// The settings, and the socket that systemd passed on, if it did; they are safe there, too.
fn settings() -> anyhow::Result<(Config, Option<Listener>)> {
    let config = config()?;
    let passed = Listener::passed().context("systemd must pass one socket that listens");
    let Some(listener) = passed.map_err(|error| StartError::Config(format!("{error:#}")))? else {
        return Ok((config, None));
    };
    let address = listener.address().context("the socket that systemd passed")?;
    let config = config.listening_on(address).map_err(|error| StartError::Config(error.to_string()))?;
    Ok((config, Some(listener)))
}

/// What the server is started for.
enum Wanted {
    Serving(Hangups),
    Demo { once: bool },
}

/// Serves until it is told to stop; with the demo, perhaps only for its one call.
async fn serve(config: Config, listener: Option<Listener>, wanted: Wanted) -> anyhow::Result<()> {
    let open = |path: &PathBuf| {
        Audit::open(path.clone()).map_err(|error| StartError::Config(start::cannot_audit(path, &error)))
    };
    let audit = config.audit_file.as_ref().map(open).transpose()?;
    process::init_logging(&config.log, config.log_format, audit.clone()).map_err(StartError::Config)?;
    let ended = serve_with(config, listener, wanted, audit.clone()).await;
    if let Some(audit) = audit {
        audit.flush(AUDIT_GRACE);
    }
    ended
}

async fn serve_with(
    config: Config,
    listener: Option<Listener>,
    wanted: Wanted,
    audit: Option<Audit>,
) -> anyhow::Result<()> {
    let shutdown = process::shutdown_token()?;
    let warnings = config.warnings();
    let server = bind(&config, listener, matches!(wanted, Wanted::Demo { .. })).await?;
    let base_url = match server.address() {
        Listen::Tcp(address) => format!("http://{address}"),
        socket @ Listen::Unix(_) => socket.to_string(),
    };
    tracing::info!(version = process::VERSION, url = %base_url, "listening");
    if let Some(address) = server.admin_addr() {
        tracing::info!(admin = %format_args!("http://{address}"), "listening for the operator");
    }
    for warning in warnings {
        tracing::warn!("{warning}");
    }
    let once = match wanted {
        Wanted::Demo { once } => once,
        Wanted::Serving(hangups) => {
            let _reloading = reload_on_hangup(server.reload(), audit, hangups);
            let sessions = server.registry();
            let _supervised = systemd::supervise(shutdown.clone(), move || format!("{} chat sessions", sessions()));
            server.run(shutdown).await;
            return Ok(());
        }
    };
    anyhow::ensure!(server.address().tcp().is_some(), "the demo needs an address in OPENCLAW_PROXY_LISTEN");
    let demo = Demo { base_url, app_token: config.app_token, openclaw_token: config.openclaw_token };
    let server = tokio::spawn(server.run(shutdown.clone()));
    let stay = async {
        if !once {
            shutdown.cancelled().await
        }
    };
    let result = demo.run(&mut io::stdout(), stay).await;
    shutdown.cancel();
    server.await?;
    result
}

fn print_token(out: &mut impl Write) -> io::Result<()> {
    let token = new_token()?;
    writeln!(out, "token:   {token}\nSHA-256: {}", TokenHash::of(token.as_bytes()))?;
    out.flush()
}

#[cfg(unix)]
type Hangups = tokio::signal::unix::Signal;
#[cfg(not(unix))]
type Hangups = ();

/// What says that SIGHUP has come.
#[cfg(unix)]
fn hangups() -> io::Result<Hangups> {
    tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())
}

#[cfg(not(unix))]
fn hangups() -> io::Result<Hangups> {
    Ok(())
}

/// Reads the file of tenants again, and opens the audit log anew, whenever SIGHUP comes; the task ends with what is returned.
#[cfg(unix)]
fn reload_on_hangup(mut reload: Reload, audit: Option<Audit>, mut hangups: Hangups) -> tokio::task::JoinSet<()> {
    let mut task = tokio::task::JoinSet::new();
    task.spawn(async move {
        while hangups.recv().await.is_some() {
            systemd::while_reloading(async {
                if let Some(audit) = &audit {
                    audit.reopen();
                }
                match reload.run().await {
                    Ok(news) => tracing::info!("{news}"),
                    Err(error) => tracing::error!("{error} What was read before stays in force."),
                }
            })
            .await;
        }
    });
    task
}

#[cfg(not(unix))]
fn reload_on_hangup(_: Reload, _: Option<Audit>, (): Hangups) {}

/// Examines a deployment and tells what was found: whether all is well.
async fn doctor(args: DoctorArgs, config: Config, out: &mut impl Write) -> anyhow::Result<bool> {
    let url = match (args.url, &config.public_url, &config.listen) {
        (Some(url), ..) => url,
        (None, Some(url), _) => url.base.clone(),
        (None, None, Listen::Tcp(address)) => format!("http://{}", reachable(*address)),
        (None, None, Listen::Unix(_)) => {
            let what = "OPENCLAW_PROXY_LISTEN is a Unix socket: say with --url where the reverse proxy in front is.";
            return Err(StartError::Config(what.to_owned()).into());
        }
    };
    let token = |file: Option<&Path>, setting: Token| file.map_or(Ok(setting), read_token);
    let default_idle = if args.thorough { doctor::THOROUGH_IDLE } else { doctor::QUICK_IDLE };
    let idle = args.idle.map_or(Some(default_idle), |idle| Duration::try_from_secs_f64(idle).ok());
    let most = doctor::MAX_IDLE;
    let bad_idle = || StartError::Config(format!("--idle must be from 0 to {} seconds.", most.as_secs()));
    let report = doctor::examine(&doctor::Options {
        base: Base::parse(&url).map_err(StartError::Config)?,
        app_token: token(args.app_token_file.as_deref(), config.app_token)?,
        openclaw_token: token(args.openclaw_token_file.as_deref(), config.openclaw_token)?,
        idle: idle.filter(|idle| *idle <= most).ok_or_else(bad_idle)?,
        max_body_bytes: config.max_body_bytes,
    })
    .await;
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&report)?)?;
    } else {
        report.print(out)?;
    }
    Ok(report.is_well())
}

fn read_token(file: &Path) -> Result<Token, StartError> {
    let unusable = |why: &dyn std::fmt::Display| {
        StartError::Config(format!("The token file {} is not usable: {why}.", file.display()))
    };
    let token = std::fs::read_to_string(file).map_err(|error| unusable(&error))?;
    let token = token.trim();
    let is_token = !token.is_empty() && token.bytes().all(|b| b.is_ascii_graphic());
    if is_token { Ok(Token::new(token)) } else { Err(unusable(&"it must hold visible ASCII characters on one line")) }
}

async fn health(config: &Config) -> anyhow::Result<()> {
    let http = reqwest::Client::builder().timeout(HEALTH_TIMEOUT).no_proxy();
    let (http, host) = match &config.listen {
        Listen::Tcp(address) => (http, reachable(*address).to_string()),
        #[cfg(unix)]
        Listen::Unix(path) => (http.unix_socket(path.as_path()), "localhost".to_owned()),
        #[cfg(not(unix))]
        Listen::Unix(_) => anyhow::bail!("there are no Unix sockets here"),
    };
    let answer = http.build()?.get(format!("http://{host}/health")).send().await?.error_for_status()?.text().await?;
    anyhow::ensure!(answer == "ok", "it answered something else than ok");
    Ok(())
}

/// Where a server can be reached that listens at `address`, which may stand for all addresses.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        let is_v4 = address.is_ipv4();
        address.set_ip(if is_v4 { Ipv4Addr::LOCALHOST.into() } else { Ipv6Addr::LOCALHOST.into() });
    }
    address
}

/// Listens where the settings say; the demo takes any port if the default one is taken.
async fn bind(config: &Config, passed: Option<Listener>, any_port: bool) -> anyhow::Result<Server> {
    let server = match passed {
        Some(listener) => Server::on(listener, config.clone()).await,
        None => Server::bind(config.clone()).await,
    };
    match server {
        Err(error)
            if any_port && error.kind() == io::ErrorKind::AddrInUse && config.listen == Config::default().listen =>
        {
            let mut free = config.clone();
            free.listen = Listen::Tcp((Ipv4Addr::LOCALHOST, 0).into());
            Server::bind(free).await.context("cannot listen on any port")
        }
        result => result.map_err(|error| StartError::of(&config.listen, &error).into()),
    }
}
