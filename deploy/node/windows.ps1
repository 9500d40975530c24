# The node on Windows, for as long as its user is logged on: a task of the user's own, with no service and no
# administrator. A service would run apart from the desktop, without a screen, a camera, a microphone and a voice.
#
# Change the proxy and its token, then run this once in PowerShell. The two variables are the user's; without them there
# is no bridge. To undo it: Unregister-ScheduledTask 'OpenClaw node'
# It has not been tried on Windows yet.

$program = "$env:LOCALAPPDATA\OpenClaw\openclaw-node.exe"
[Environment]::SetEnvironmentVariable('OPENCLAW_PROXY_SERVER_URL', 'https://mcp.example.com', 'User')
[Environment]::SetEnvironmentVariable('OPENCLAW_PROXY_APP_TOKEN', 'replace-me', 'User')

$settings = @{
    Action   = New-ScheduledTaskAction -Execute $program -Argument 'serve'
    Trigger  = New-ScheduledTaskTrigger -AtLogOn -User $env:USERNAME
    # It starts again a minute after it fails, and runs on batteries and for any time.
    Settings = New-ScheduledTaskSettingsSet -RestartCount 999 -RestartInterval (New-TimeSpan -Minutes 1) `
        -ExecutionTimeLimit ([TimeSpan]::Zero) -AllowStartIfOnBatteries -DontStopIfGoingOnBatteries
}
Register-ScheduledTask -TaskName 'OpenClaw node' @settings -Force
Start-ScheduledTask -TaskName 'OpenClaw node'
