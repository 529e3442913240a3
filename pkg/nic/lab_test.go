// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package nic

import (
	"log/slog"
	"maps"
	"os/exec"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/cilium/networkdriver/internal/testenv"
)

// Linux's own igb has all kinds of settings. Of the emulated card it offers no flow rules, and one queue only.
func TestLabSettings(t *testing.T) {
	pf := testenv.LabPF(t)
	host, err := OpenOwn(slog.New(slog.DiscardHandler), "/sys")
	require.NoError(t, err)
	defer host.Close()
	link, err := host.ByName(pf)
	require.NoError(t, err)
	require.NotNil(t, link)
	read := func(t *testing.T) Settings {
		t.Helper()
		all, err := host.Settings(link)
		require.NoError(t, err)
		return all
	}
	// What is negotiated of flow control comes a while after a card was reset.
	steady := func(s Settings) Settings {
		s = maps.Clone(s)
		s[flowControl.name] = s[flowControl.name][:1]
		return s
	}
	before := read(t)
	for _, k := range settings {
		require.Contains(t, before, k.name)
	}

	for name, args := range map[string][]string{
		"ring sizes":    {"-G", pf, "rx", "512", "tx", "1024"},
		"coalescing":    {"-C", pf, "rx-usecs", "100"},
		"features":      {"-K", pf, "tso", "off", "gso", "off", "rxvlan", "off"},
		"hashed fields": {"-N", pf, "rx-flow-hash", "udp4", "sdfn"},
		"private flags": {"--set-priv-flags", pf, "legacy-rx", "on"},
		"message level": {"-s", pf, "msglvl", "drv", "on", "hw", "on", "tx_done", "on"},
		"flow control":  {"-A", pf, "autoneg", "off", "rx", "off", "tx", "off"},
	} {
		t.Run(name, func(t *testing.T) {
			out, err := exec.Command("ethtool", args...).CombinedOutput()
			require.NoError(t, err, "%s", out)
			require.NotEqual(t, steady(before), steady(read(t)))
			require.NoError(t, host.PutBack(link, before))
			require.Equal(t, steady(before), steady(read(t)))
		})
	}
}
