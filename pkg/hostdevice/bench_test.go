// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package hostdevice

import (
	"os"
	"path/filepath"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var subPluginTook = regexp.MustCompile(`subPluginTook=(\S+)`)

// BenchmarkAddDel attaches and gives back a NIC, each as a runtime does, by starting the plugin. own-ms is ADD without
// the sub-plugins, del-ms is DEL, which has none, and own-% is the plugin's part of both. start-ms is what it costs here
// to start the plugin for nothing (VERSION), which is in all of them.
func BenchmarkAddDel(bench *testing.B) {
	b := newBed(bench)
	b.host.address(nicName, "10.1.2.130/25", "2001:db8::5/64")
	conf := b.single(routeFields(1, 19))
	var add, sub, del, start time.Duration
	for bench.Loop() {
		started := time.Now()
		log := b.must("ADD", conf)
		add += time.Since(started)
		match := subPluginTook.FindStringSubmatch(log)
		require.NotNil(bench, match, log)
		took, err := time.ParseDuration(match[1])
		require.NoError(bench, err)
		sub += took
		started = time.Now()
		b.must("DEL", conf)
		del += time.Since(started)
		started = time.Now()
		b.must("VERSION", conf)
		start += time.Since(started)
	}
	n := float64(bench.N)
	ms := func(d time.Duration) float64 { return float64(d.Microseconds()) / 1000 / n }
	bench.ReportMetric(ms(add), "add-ms")
	bench.ReportMetric(ms(add-sub), "own-ms")
	bench.ReportMetric(ms(del), "del-ms")
	bench.ReportMetric(ms(start), "start-ms")
	bench.ReportMetric(100*float64(add-sub+del)/float64(add+del), "own-%")
	info, err := os.Stat(filepath.Join(b.bin, Name))
	require.NoError(bench, err)
	bench.ReportMetric(float64(info.Size())/1e6, "binary-MB")
}

func BenchmarkParseConfig(b *testing.B) {
	conf := []byte(`{"cniVersion": "1.1.0", "name": "fabric", "type": "amd-host-device", "deviceID": "0000:03:00.1", "nexthopNetAddrOffset": 1, "routeDstPrefixLen": 19}`)
	b.ReportAllocs()
	node, err := readNodeConfig("/nowhere/amd-host-device.json")
	require.NoError(b, err)
	for b.Loop() {
		if _, err, invalid := parseConfig(conf, node); err != nil || invalid != nil {
			b.Fatal(err, invalid)
		}
	}
}
