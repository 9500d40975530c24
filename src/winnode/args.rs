//! The arguments of `winnode`.

/// What is printed when it is called without sense.
pub const USAGE: &str = "\
Usage: winnode --command <name> [--params <json>|@<file>] [options]
       winnode --list-tools [options]

Calls one command of the local MCP server and prints its result.

  --command <name>         the command, such as system.which
  --list-tools             list the commands instead
  --params <json>|@<file>  its arguments: a JSON object, or a file that holds one [default: {}]
  --invoke-timeout <ms>    how long it may take, 1 to 600000 [default: 15000]
  --mcp-url <url>          the server's URL; wins over a port
  --mcp-port <port>        the server's port on this machine [env: OPENCLAW_MCP_PORT; default: 8765]
  --mcp-token <token>      the server's token; process listings show it, so better use OPENCLAW_MCP_TOKEN
  --identity release|dev   whose token file is read [env: OPENCLAW_APP_IDENTITY; default: release]
  --node <name>            accepted and ignored
  --idempotency-key <key>  accepted and ignored
  --verbose                say on stderr what is done, and print errors whole
  -h, --help               print this
  -V, --version            print the version; alone

Exit codes: 0 it worked; 1 it did not; 2 the arguments are wrong.
";

/// How long a command may take if nothing is said.
const DEFAULT_TIMEOUT_MS: u32 = 15_000;
/// The longest that can be asked for.
const MAX_TIMEOUT_MS: u32 = 600_000;

/// The arguments as they were given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Args {
    /// The command to call.
    pub command: Option<String>,
    /// List the commands instead.
    pub list_tools: bool,
    /// The command's arguments, or the file that holds them.
    pub params: String,
    /// How long the command may take, in milliseconds.
    pub invoke_timeout_ms: u32,
    /// The server's URL.
    pub mcp_url: Option<String>,
    /// The server's port.
    pub mcp_port: Option<u16>,
    /// The server's token.
    pub mcp_token: Option<String>,
    /// The name of the installation.
    pub identity: Option<String>,
    /// Ignored.
    pub node: Option<String>,
    /// Ignored.
    pub idempotency_key: Option<String>,
    /// Say more.
    pub verbose: bool,
}

impl Default for Args {
    fn default() -> Self {
        Args {
            command: None,
            list_tools: false,
            params: "{}".to_owned(),
            invoke_timeout_ms: DEFAULT_TIMEOUT_MS,
            mcp_url: None,
            mcp_port: None,
            mcp_token: None,
            identity: None,
            node: None,
            idempotency_key: None,
            verbose: false,
        }
    }
}

impl Args {
    /// Reads arguments.
    ///
    /// # Errors
    /// A sentence that names the flag.
    pub fn parse(args: &[String]) -> Result<Args, String> {
        let mut parsed = Args::default();
        let mut rest = args.iter();
        while let Some(flag) = rest.next() {
            let mut value = || rest.next().cloned().ok_or_else(|| format!("{flag} needs a value."));
            match &**flag {
                "--command" => parsed.command = Some(value()?),
                "--list-tools" => parsed.list_tools = true,
                "--params" => parsed.params = value()?,
                "--invoke-timeout" => {
                    parsed.invoke_timeout_ms = number(flag, &value()?, MAX_TIMEOUT_MS)?;
                }
                "--mcp-url" => parsed.mcp_url = Some(value()?).filter(|url| !url.trim().is_empty()),
                "--mcp-port" => {
                    let port = number(flag, &value()?, u16::MAX.into())?;
                    parsed.mcp_port = u16::try_from(port).ok();
                }
                "--mcp-token" => parsed.mcp_token = Some(value()?).filter(|token| !token.trim().is_empty()),
                "--identity" => parsed.identity = Some(value()?),
                "--node" => parsed.node = Some(value()?),
                "--idempotency-key" => parsed.idempotency_key = Some(value()?),
                "--verbose" => parsed.verbose = true,
                _ => return Err(format!("{flag} is not a flag of winnode.")),
            }
        }
        match &parsed.command {
            _ if parsed.list_tools && parsed.command.is_some() => {
                Err("--list-tools and --command exclude each other.".to_owned())
            }
            Some(command) if !command.trim().is_empty() => Ok(parsed),
            _ if parsed.list_tools => Ok(parsed),
            _ => Err("--command is missing.".to_owned()),
        }
    }
}

fn number(flag: &str, value: &str, max: u32) -> Result<u32, String> {
    let number = value.parse::<u32>().ok().filter(|number| (1..=max).contains(number));
    number.ok_or_else(|| format!("{flag} must be a whole number from 1 to {max}."))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(args: &[&str]) -> Result<Args, String> {
        Args::parse(&args.iter().map(|arg| (*arg).to_owned()).collect::<Vec<_>>())
    }

    #[test]
    fn every_flag_is_read() {
        let args = parse(&[
            "--command",
            "a.b",
            "--params",
            "{\"x\":1}",
            "--invoke-timeout",
            "600000",
            "--mcp-url",
            "http://h/",
            "--mcp-port",
            "65535",
            "--mcp-token",
            "--t",
            "--identity",
            "dev",
            "--node",
            "n",
            "--idempotency-key",
            "k",
            "--verbose",
        ]);
        let expected = Args {
            command: Some("a.b".into()),
            list_tools: false,
            params: "{\"x\":1}".into(),
            invoke_timeout_ms: 600_000,
            mcp_url: Some("http://h/".into()),
            mcp_port: Some(65535),
            mcp_token: Some("--t".into()),
            identity: Some("dev".into()),
            node: Some("n".into()),
            idempotency_key: Some("k".into()),
            verbose: true,
        };
        assert_eq!(args.unwrap(), expected);
        assert_eq!(parse(&["--list-tools", "--mcp-url", " "]).unwrap(), Args { list_tools: true, ..Args::default() });
    }

    #[test]
    fn what_is_wrong_is_named() {
        for flag in [
            "--command",
            "--params",
            "--invoke-timeout",
            "--mcp-url",
            "--mcp-port",
            "--mcp-token",
            "--identity",
            "--node",
            "--idempotency-key",
            "--bogus",
            "bogus",
        ] {
            assert!(parse(&["--list-tools", flag]).unwrap_err().contains(flag), "{flag}");
        }
        for (flag, value) in [
            ("--invoke-timeout", "0"),
            ("--invoke-timeout", "-5"),
            ("--invoke-timeout", "abc"),
            ("--invoke-timeout", "600001"),
            ("--mcp-port", "0"),
            ("--mcp-port", "65536"),
            ("--mcp-port", "1.5"),
        ] {
            assert!(parse(&["--list-tools", flag, value]).unwrap_err().contains(flag), "{flag} {value}");
        }
        assert!(parse(&["--verbose"]).unwrap_err().contains("--command"));
        assert!(parse(&["--command", " "]).unwrap_err().contains("--command"));
        assert!(parse(&["--command", "x", "--list-tools"]).unwrap_err().contains("exclude"));
        assert_eq!(parse(&["--list-tools", "--invoke-timeout", "1"]).unwrap().invoke_timeout_ms, 1);
    }
}
