// SPDX-License-Identifier: Apache-2.0
// Copyright Authors of Cilium

package ndev

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	kubetypes "k8s.io/apimachinery/pkg/types"
	"k8s.io/cli-runtime/pkg/genericiooptions"

	"github.com/cilium/networkdriver/api/v2alpha1"
)

// sliceOf is a slice of VFs with all the attributes that the driver gives them.
func sliceOf(node, pool string, devices int) *resourceapi.ResourceSlice {
	text := func(s string) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{StringValue: &s} }
	number := func(n int64) resourceapi.DeviceAttribute { return resourceapi.DeviceAttribute{IntValue: &n} }
	slice := &resourceapi.ResourceSlice{
		ObjectMeta: metav1.ObjectMeta{Name: node + "-networkdriver.cilium.io-" + pool},
		Spec: resourceapi.ResourceSliceSpec{
			Driver: v2alpha1.DefaultDriverName, NodeName: &node,
			Pool: resourceapi.ResourcePool{Name: node + "/" + pool, Generation: 1, ResourceSliceCount: 1},
		},
	}
	for i := range devices {
		slice.Spec.Devices = append(slice.Spec.Devices, resourceapi.Device{
			Name: fmt.Sprintf("dev-%d", i),
			Attributes: map[resourceapi.QualifiedName]resourceapi.DeviceAttribute{
				"pool": text(pool), "deviceManager": text("sr-iov"), "ifName": text(fmt.Sprintf("ens1f0v%d", i)),
				"kernelIfName": text(fmt.Sprintf("ens1f0v%d", i)), "mtu": number(1500), "mac": text("02:00:00:00:00:01"), "pfName": text("ens1f0"),
				"vfID": number(int64(i)), "vendor": text("0x8086"), "deviceID": text("0x10ca"), "driver": text("igbvf"),
				"resource.kubernetes.io/pciBusID": text(fmt.Sprintf("0000:03:%02x.1", i)), "resource.kubernetes.io/pcieRoot": text("pci0000:00"),
			},
		})
	}
	return slice
}

// claimOf is a claim for a device of the pool, in the number of a benchmark's namespaces.
func claimOf(name string, namespace int) *resourceapi.ResourceClaim {
	in := "default"
	if namespace > 0 {
		in = fmt.Sprintf("team-%d", namespace)
	}
	return &resourceapi.ResourceClaim{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: in, UID: kubetypes.UID("uid-" + name)},
		Spec: resourceapi.ResourceClaimSpec{Devices: resourceapi.DeviceClaim{
			Requests: []resourceapi.DeviceRequest{{Name: "net", Exactly: &resourceapi.ExactDeviceRequest{DeviceClassName: "pool"}}},
			Config: []resourceapi.DeviceClaimConfiguration{{DeviceConfiguration: resourceapi.DeviceConfiguration{
				Opaque: &resourceapi.OpaqueDeviceConfiguration{
					Driver: v2alpha1.DefaultDriverName, Parameters: runtime.RawExtension{Raw: []byte(`{"network":"storage","podIfName":"sriov0"}`)},
				},
			}}},
		}},
	}
}

// allot gives a device to the claim, as the scheduler and the node do.
func allot(claim *resourceapi.ResourceClaim, node, device, pod string, uid kubetypes.UID) {
	claim.Status = resourceapi.ResourceClaimStatus{
		Allocation: &resourceapi.AllocationResult{Devices: resourceapi.DeviceAllocationResult{
			Results: []resourceapi.DeviceRequestAllocationResult{{Request: "net", Driver: v2alpha1.DefaultDriverName, Pool: node + "/pool",
				Device: device}},
			Config: []resourceapi.DeviceAllocationConfiguration{{
				Source: resourceapi.AllocationConfigSourceClaim, DeviceConfiguration: claim.Spec.Devices.Config[0].DeviceConfiguration,
			}},
		}},
		ReservedFor: []resourceapi.ResourceClaimConsumerReference{{Resource: "pods", Name: pod, UID: uid}},
		Devices: []resourceapi.AllocatedDeviceStatus{{
			Driver: v2alpha1.DefaultDriverName, Pool: node + "/pool", Device: device,
			// Of the length that the driver's records have.
			Data: &runtime.RawExtension{Raw: fmt.Appendf(nil,
				`{"podUID":%q,"config":{"network":"storage","joined":{"vlan":1001}},"device":{"state":%q}}`, uid, strings.Repeat("x", 800))},
			Conditions: []metav1.Condition{{
				Type: "Ready", Status: metav1.ConditionTrue, Reason: "Attached", Message: "interface sriov0 is in the pod",
				LastTransitionTime: metav1.NewTime(time.Unix(1, 0)),
			}},
			NetworkData: &resourceapi.NetworkDeviceData{InterfaceName: "sriov0", HardwareAddress: "02:00:00:00:00:01",
				IPs: []string{"192.0.2.7/24", "2001:db8::7/64"}},
		}},
	}
}

// large is an API server of as many nodes as one likes.
type large struct {
	nodes, perNode, claims int
	encoder                runtime.Encoder
}

// ServeHTTP implements [http.Handler].
func (l *large) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	limit, _ := strconv.Atoi(query.Get("limit"))
	from, _ := strconv.Atoi(query.Get("continue"))
	meta := func(all int) (to int, m metav1.ListMeta) {
		m.ResourceVersion = "1"
		if to = min(all, from+limit); to < all {
			m.Continue = strconv.Itoa(to)
		}
		return to, m
	}
	var list runtime.Object
	switch {
	case strings.HasSuffix(r.URL.Path, "/resourceslices"):
		if selector, err := fields.ParseSelector(query.Get("fieldSelector")); err == nil {
			if node, ok := selector.RequiresExactMatch(resourceapi.ResourceSliceSelectorNodeName); ok {
				list = &resourceapi.ResourceSliceList{Items: []resourceapi.ResourceSlice{*sliceOf(node, "pool", l.perNode)}}
				break
			}
		}
		to, m := meta(l.nodes)
		slices := &resourceapi.ResourceSliceList{ListMeta: m}
		for i := from; i < to; i++ {
			slices.Items = append(slices.Items, *sliceOf(nodeName(i), "pool", l.perNode))
		}
		list = slices
	case strings.HasSuffix(r.URL.Path, "/resourceclaims"):
		to, m := meta(l.claims)
		claims := &resourceapi.ResourceClaimList{ListMeta: m}
		for i := from; i < to; i++ {
			claim := claimOf(fmt.Sprintf("app-%d-net-x7k2p", i), 1+i%100)
			allot(claim, nodeName(i%l.nodes), fmt.Sprintf("dev-%d", i/l.nodes), fmt.Sprintf("app-%d", i), kubetypes.UID(fmt.Sprintf("pod-uid-%d",
				i)))
			claims.Items = append(claims.Items, *claim)
		}
		list = claims
	case strings.HasSuffix(r.URL.Path, "/"+v2alpha1.NodeConfigResource):
		to, m := meta(l.nodes)
		configs := &v2alpha1.CiliumNetworkDriverNodeConfigList{
			TypeMeta: metav1.TypeMeta{APIVersion: v2alpha1.SchemeGroupVersion.String(), Kind: "CiliumNetworkDriverNodeConfigList"}, ListMeta: m,
		}
		for i := from; i < to; i++ {
			config := v2alpha1.CiliumNetworkDriverNodeConfig{ObjectMeta: metav1.ObjectMeta{Name: nodeName(i)}}
			config.Status.Conditions = []metav1.Condition{{Type: v2alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Serving"}}
			configs.Items = append(configs.Items, config)
		}
		w.Header().Set("Content-Type", runtime.ContentTypeJSON)
		_ = json.NewEncoder(w).Encode(configs)
		return
	default:
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", runtime.ContentTypeProtobuf)
	_ = l.encoder.Encode(list, w)
}

func nodeName(i int) string { return fmt.Sprintf("worker-%05d.example.com", i) }

func newLarge(tb testing.TB, nodes, perNode, claims int) string {
	scheme := runtime.NewScheme()
	require.NoError(tb, resourceapi.AddToScheme(scheme))
	serializer := protobuf.NewSerializer(scheme, scheme)
	server := httptest.NewServer(&large{nodes, perNode, claims, withKind{serializer, scheme}})
	tb.Cleanup(server.Close)
	return server.URL
}

// withKind encodes lists with the kinds that they have in the scheme.
type withKind struct {
	runtime.Encoder
	scheme *runtime.Scheme
}

// Encode implements [runtime.Encoder].
func (e withKind) Encode(object runtime.Object, w io.Writer) error {
	kinds, _, err := e.scheme.ObjectKinds(object)
	if err != nil {
		return err
	}
	object.GetObjectKind().SetGroupVersionKind(kinds[0])
	return e.Encoder.Encode(object, w)
}

// childEnv has the test program be kubectl ndev.
const childEnv = "NETWORKDRIVER_TEST_NDEV"

func TestMain(m *testing.M) {
	if args, ok := os.LookupEnv(childEnv); ok {
		cmd := Command(genericiooptions.IOStreams{In: os.Stdin, Out: os.Stdout, ErrOut: os.Stderr})
		cmd.SetArgs(strings.Fields(args))
		if cmd.Execute() != nil {
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestMany: of more devices than fit a page each has one line.
func TestMany(t *testing.T) {
	const nodes, perNode, claims = 2*pageSize + 1, 2, 350
	url := newLarge(t, nodes, perNode, claims)
	streams, _, out, _ := genericiooptions.NewTestIOStreams()
	cmd := Command(streams)
	cmd.SetArgs([]string{"--no-headers", "--server", url, "--kubeconfig", os.DevNull})
	require.NoError(t, cmd.ExecuteContext(t.Context()))
	require.Equal(t, nodes*perNode, strings.Count(out.String(), "\n"))
	require.Equal(t, claims, strings.Count(out.String(), "Attached"))
}

// BenchmarkNdev lists 5,000 nodes of 64 devices, a tenth of which claims have, in a process of its own: it tells that one's processor
// time and highest resident memory.
func BenchmarkNdev(b *testing.B) {
	const nodes, perNode = 5000, 64
	url := newLarge(b, nodes, perNode, nodes*perNode/10)
	for _, args := range []string{"", "-o json", "--unhealthy", "--node worker-00007.example.com"} {
		b.Run("args="+strings.ReplaceAll(args, " ", "_"), func(b *testing.B) {
			var cpu time.Duration
			var memory int64
			var lines, size int
			for b.Loop() {
				cmd := exec.CommandContext(b.Context(), os.Args[0])
				cmd.Env = append(os.Environ(), childEnv+"="+args+" --server "+url+" --kubeconfig "+os.DevNull)
				out, err := cmd.Output()
				require.NoError(b, err)
				usage := cmd.ProcessState.SysUsage().(*syscall.Rusage)
				cpu += cmd.ProcessState.SystemTime() + cmd.ProcessState.UserTime()
				memory = max(memory, usage.Maxrss*1024)
				lines, size = bytes.Count(out, []byte("\n")), len(out)
			}
			b.ReportMetric(cpu.Seconds()/float64(b.N), "cpu-s/op")
			b.ReportMetric(float64(memory)/(1<<20), "MiB-rss")
			b.ReportMetric(float64(lines), "lines")
			b.ReportMetric(float64(size)/(1<<20), "MiB-out")
		})
	}
}
