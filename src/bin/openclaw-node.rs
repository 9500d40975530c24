//! The node's program: reads flags, serves or lends until it is told to stop, ends with a code.

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use clap_complete::Shell;
use openclaw_mcp_proxy::node::approvals::cli::ApprovalsArgs;
use openclaw_mcp_proxy::node::lend::{self, LendArgs};
use openclaw_mcp_proxy::node::serve::{self, ServeArgs, folder};
use openclaw_mcp_proxy::node::settings::{self, Settings};
use openclaw_mcp_proxy::node::token;
use openclaw_mcp_proxy::process::{self, LogFormat};
use tokio_util::sync::CancellationToken;

/// Lends tools of this computer to OpenClaw and any other MCP client, on this computer and through the OpenClaw MCP Proxy.
#[derive(Parser)]
#[command(name = "openclaw-node", version = process::VERSION)]
struct Cli {
    #[command(subcommand)]
    command: Command,
    /// What is logged to stderr
    #[arg(long, global = true, value_name = "FILTER", env = "OPENCLAW_PROXY_LOG", default_value = "info,rmcp=warn")]
    log: String,
}

#[derive(Subcommand)]
enum Command {
    /// Serve this computer's own capabilities: to MCP clients on it, over a bridge, or both.
    Serve(ServeArgs),
    /// Lend the tools of an MCP server that already exists: one with a URL, or a program that speaks on stdio.
    Lend(LendArgs),
    /// Say which programs may be run on this computer.
    Approvals(ApprovalsArgs),
    /// The token that local MCP clients must send.
    Token {
        #[command(subcommand)]
        command: TokenCommand,
    },
    /// What is switched on.
    Settings {
        #[command(subcommand)]
        command: SettingsCommand,
    },
    /// Print what a shell needs to complete this program's commands and flags.
    Completions {
        /// The shell
        shell: Shell,
    },
}

#[derive(Subcommand)]
enum TokenCommand {
    /// Print it; it is made if there is none.
    Show,
    /// Print where it is kept.
    Path,
    /// Make a new one and print it. The old one fails from the next request on.
    Reset,
}

#[derive(Subcommand)]
enum SettingsCommand {
    /// Print every switch; a node that runs has those that were set when it started.
    List,
    /// Set a switch.
    Set {
        /// Its name
        name: String,
        /// true or false
        #[arg(action = clap::ArgAction::Set)]
        on: bool,
    },
}

/// EX_CONFIG of sysexits.h: something is wrong with the settings, and trying again does not help.
const EXIT_CONFIG: u8 = 78;

#[tokio::main]
async fn main() -> ExitCode {
    let parsed = process::without_empty_variables(Cli::command()).try_get_matches();
    let Cli { command, log } = parsed.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|e| e.exit());
    if let Err(error) = process::init_logging(&log, LogFormat::Human, None) {
        return fail(EXIT_CONFIG, &error);
    }
    let out = &mut io::stdout();
    let ended = match command {
        Command::Serve(args) => {
            let serve = async |stop| serve::serve(args, out, stop).await.map_err(|e| (e.is_config(), e.to_string()));
            until_stopped(serve).await
        }
        Command::Lend(args) => {
            let lend =
                async |stop| lend::lend(args.into(), out, stop).await.map_err(|e| (e.is_config(), e.to_string()));
            until_stopped(lend).await
        }
        Command::Approvals(args) => return approvals(args),
        Command::Completions { shell } => {
            process::print_completions(Cli::command(), shell, out).map_err(|error| (false, error.to_string()))
        }
        Command::Token { command } => token(&command, out).map_err(|error| (false, format!("{error:#}"))),
        Command::Settings { command } => settings(command, out).map_err(|error| (true, format!("{error:#}"))),
    };
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err((is_config, why)) => fail(if is_config { EXIT_CONFIG } else { 1 }, &why),
    }
}

/// How something ended: if badly, whether the settings are to blame, and a sentence.
type Ended = Result<(), (bool, String)>;

async fn until_stopped(work: impl AsyncFnOnce(CancellationToken) -> Ended) -> Ended {
    let stop = process::shutdown_token().map_err(|error| (false, error.to_string()))?;
    work(stop).await
}

/// It ends with 1 if the answer is no.
fn approvals(args: ApprovalsArgs) -> ExitCode {
    match args.run(|name| std::env::var(name).ok(), &mut std::io::stdout()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => fail(1, &error.to_string()),
    }
}

fn token(command: &TokenCommand, out: &mut impl Write) -> anyhow::Result<()> {
    let path = folder()?.join(token::FILE_NAME);
    match command {
        TokenCommand::Show => writeln!(out, "{}", token::load_or_create(&path)?.expose())?,
        TokenCommand::Path => writeln!(out, "{}", path.display())?,
        TokenCommand::Reset => writeln!(out, "{}", token::reset(&path)?.expose())?,
    }
    Ok(())
}

fn settings(command: SettingsCommand, out: &mut impl Write) -> anyhow::Result<()> {
    let path = folder()?.join(settings::FILE_NAME);
    let mut settings = Settings::load(&path)?;
    match command {
        SettingsCommand::List => {
            for name in settings::names() {
                let on = match settings.switch(name)? {
                    None if [settings::LOCAL_MCP, settings::BRIDGE].contains(&name) => "not set".to_owned(),
                    _ => settings.is_enabled(name).to_string(),
                };
                writeln!(out, "{name} {on}")?;
            }
        }
        SettingsCommand::Set { name, on } => {
            settings.set(&name, on)?;
            settings.save(&path)?;
        }
    }
    Ok(())
}

fn fail(code: u8, message: &str) -> ExitCode {
    process::last_words(&format!("openclaw-node: {message}"));
    ExitCode::from(code)
}
